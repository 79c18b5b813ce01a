"""What is read of an engine's own figures."""

from kvxfer.pd.launch.counters import Counters, parse_counters

TEXT = """# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a b"} 1.5e+03
vllm:prompt_tokens_total{engine="1",model_name="a b"} 500.0
vllm:prompt_tokens_created{engine="0"} 1.7e+09
vllm:generation_tokens_total{engine="0"} 7.0
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 3.0
vllm:prefix_cache_hits_total{engine="0"} 16.0
vllm:num_preemptions_total{engine="0"} 1.0
process_open_fds 12.0
"""


def test_figures_are_summed_over_labels() -> None:
    assert parse_counters(TEXT) == Counters(
        num_running=2,
        num_waiting=3,
        num_prompt_tokens=2000,
        num_output_tokens=7,
        num_cached_tokens=16,
        num_preemptions=1,
    )


def test_a_server_that_is_no_vllm_has_none() -> None:
    assert parse_counters("process_open_fds 12.0\n") is None
    assert parse_counters("") is None


def test_a_difference_counts_and_keeps_what_runs_now() -> None:
    earlier = Counters(num_running=5, num_prompt_tokens=100, num_cached_tokens=4)
    later = Counters(num_running=1, num_prompt_tokens=130, num_cached_tokens=4)
    assert later.since(earlier) == Counters(num_running=1, num_prompt_tokens=30)
    assert (later + earlier).num_prompt_tokens == 230
