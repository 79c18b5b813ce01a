"""From the records of a benchmark to distributions, goodput, hand-over times and findings."""

from kvxfer.pd.analysis.run import analyse
from kvxfer.pd.analysis.slo import Objective, parse_objectives

__all__ = ["Objective", "analyse", "parse_objectives"]
