"""Measures what a tuning profile says: see kvxfer/tuning/DESIGN.md."""

from kvxfer.sweep.tune.run import TuneOptions, TuneRun

__all__ = ["TuneOptions", "TuneRun"]
