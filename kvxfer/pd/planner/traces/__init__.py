"""Traces: files of others, read within bounds, and loads that are made."""

from kvxfer.pd.planner.traces.azure import read_azure
from kvxfer.pd.planner.traces.mooncake import read_mooncake
from kvxfer.pd.planner.traces.reading import read_trace
from kvxfer.pd.planner.traces.synthetic import closed_loop, open_loop
from kvxfer.pd.planner.traces.vllm import read_vllm

__all__ = [
    "closed_loop",
    "open_loop",
    "read_azure",
    "read_mooncake",
    "read_trace",
    "read_vllm",
]
