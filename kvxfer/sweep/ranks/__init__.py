"""Sweeps of parallel layouts: a process for every rank of either side."""

from kvxfer.sweep.ranks.cases import RankCase, RankSide, expand_rank_cases
from kvxfer.sweep.ranks.runner import RankSweepRun

__all__ = ["RankCase", "RankSide", "RankSweepRun", "expand_rank_cases"]
