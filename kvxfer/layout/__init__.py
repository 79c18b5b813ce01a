"""Pure arithmetic on KV caches: shapes, ranks, models, views and copy plans. numpy only."""

from kvxfer.layout.kv_layout import (
    DTYPE_BYTES,
    KVKind,
    KVLayout,
    Order,
    TPLayout,
    canonical_dtype,
)
from kvxfer.layout.models import CATALOGUE, ModelShape, load_model
from kvxfer.layout.plan import BlockIds, CopyPlan, plan
from kvxfer.layout.view import KVView

__all__ = [
    "CATALOGUE",
    "DTYPE_BYTES",
    "BlockIds",
    "CopyPlan",
    "KVKind",
    "KVLayout",
    "KVView",
    "ModelShape",
    "Order",
    "TPLayout",
    "canonical_dtype",
    "load_model",
    "plan",
]
