"""Engines and proxy of a PD set-up as processes: started together, watched, and ended for sure.

DESIGN.md says why each process has a guard.
"""
