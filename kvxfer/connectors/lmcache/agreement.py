"""Whether two sides of a PD pair mean the same by a key and by a page."""

from typing import Any

from kvxfer.connectors.lmcache.wire import Facts
from kvxfer.errors import LayoutMismatch

_REMEDIES = {
    "world_size": "KV is not re-sharded between unequal numbers of ranks: run as many on both",
    "worker_id": "list the receiver's ports in the order of its ranks",
    "page_bytes": "use one chunk_size, dtype and model on both",
    "page_shape": "use one chunk_size and model on both",
    "probe": (
        "set PYTHONHASHSEED to one value on both, or pre_caching_hash_algorithm to sha256_cbor, "
        "and give both the same chunk_size"
    ),
}


def require_agreement(own: Facts, theirs: Facts, peer: str) -> None:
    """Check that what is sent under a key here is found under it at ``peer``.

    Raises:
        LayoutMismatch: names the first fact that differs, both values and the remedy.
    """
    for name in Facts.__struct_fields__:
        here, there = getattr(own, name), getattr(theirs, name)
        if here != there:
            what = "the key of the same tokens" if name == "probe" else name
            remedy = _REMEDIES.get(name, "start both with one model")
            raise LayoutMismatch(f"{what} is {here!r} here and {there!r} at {peer}; {remedy}")


def facts_of(metadata: Any, page_bytes: int, token_database: Any) -> Facts:
    """The facts of an LMCache engine, from its metadata and what makes its keys."""
    chunk_tokens = int(token_database.chunk_size)
    keys = [key for *_, key in token_database.process_tokens(list(range(chunk_tokens)))]
    return Facts(
        model=metadata.model_name,
        world_size=metadata.world_size,
        worker_id=metadata.worker_id,
        dtype=str(metadata.kv_dtype),
        page_bytes=page_bytes,
        page_shape=list(metadata.kv_shape),
        probe=keys[0].to_string(),
    )
