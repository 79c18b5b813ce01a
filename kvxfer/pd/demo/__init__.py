"""The whole pipeline on one machine in minutes: two engines, one prompt, a small load."""
