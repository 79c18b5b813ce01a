"""Pure arithmetic on KV caches: shapes, ranks, models, views and copy plans. numpy only."""

from kvxfer.layout._checks import MAX_NUM_TOKENS
from kvxfer.layout.block_ids import BlockIds
from kvxfer.layout.block_map import BlockMap
from kvxfer.layout.block_table import Blocks, BlockTable, BlockTables, as_tables
from kvxfer.layout.compatible import require_compatible
from kvxfer.layout.conversion import ToFp8
from kvxfer.layout.copy_plan import CopyBox, CopyPlan
from kvxfer.layout.kv_layout import (
    DTYPE_BYTES,
    KVKind,
    KVLayout,
    Order,
    canonical_dtype,
)
from kvxfer.layout.models import CATALOGUE, ModelShape, load_model
from kvxfer.layout.plan import match_blocks, plan
from kvxfer.layout.ranks import KVShard, TPLayout
from kvxfer.layout.route import Route
from kvxfer.layout.shares import Share, shares
from kvxfer.layout.view import KVView, Strides

__all__ = [
    "CATALOGUE",
    "DTYPE_BYTES",
    "MAX_NUM_TOKENS",
    "BlockIds",
    "BlockMap",
    "BlockTable",
    "BlockTables",
    "Blocks",
    "CopyBox",
    "CopyPlan",
    "KVKind",
    "KVLayout",
    "KVShard",
    "KVView",
    "ModelShape",
    "Order",
    "Route",
    "Share",
    "Strides",
    "TPLayout",
    "ToFp8",
    "as_tables",
    "canonical_dtype",
    "load_model",
    "match_blocks",
    "plan",
    "require_compatible",
    "shares",
]
