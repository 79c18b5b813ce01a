"""Models to serve without a network: a tiny checkpoint, and shapes for dummy weights."""

from kvxfer.pd.models.catalogue import ServedModel, find_model

__all__ = ["ServedModel", "find_model"]
