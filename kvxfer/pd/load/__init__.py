"""The articles' load against set-ups: `vllm bench serve`, a record a point, runs that resume."""
