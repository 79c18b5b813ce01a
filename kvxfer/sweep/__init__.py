"""Sweeps: move real KV shapes between two processes, check every byte, and time it."""

from kvxfer.sweep.cases import SweepCase, SweepOptions, expand_cases
from kvxfer.sweep.ranks import RankSweepRun
from kvxfer.sweep.result import SweepReport, SweepResult
from kvxfer.sweep.runner import SweepRun

__all__ = [
    "RankSweepRun",
    "SweepCase",
    "SweepOptions",
    "SweepReport",
    "SweepResult",
    "SweepRun",
    "expand_cases",
]
