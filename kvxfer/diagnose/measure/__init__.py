"""Measurements: every byte of every round is compared by the destination."""
