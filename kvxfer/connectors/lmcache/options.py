"""The connector's settings: keys that begin with ``kvxfer.`` in LMCache's ``extra_config``."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvxfer.errors import InvalidUsage

PREFIX = "kvxfer."
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the channel and the storage plug-in move pages; the rest is said by LMCache's own keys.

    Attributes:
        transport: a name of `kvxfer.available_transports`, or ``auto``. The storage plug-in's pool
            is host memory, whatever the channel's is.
        num_threads: threads of copies on hosts; None = the measured best.
        num_sms: SMs of the channel's copies on GPUs; 0 = the measured best.
        key_file: the key that both sides hold. Without one, whoever reaches the ports is let in,
            as with LMCache's own channel.
        peers: ``any``: a peer without kvxfer is served by LMCache's own channel, which takes NIXL
            on this side. ``kvxfer``: every peer has kvxfer, and NIXL is not touched.
        connect_timeout_s: how long a first contact, or the next one after a loss, may take, and a
            question to another engine's store.
        write_timeout_s: how long a batch of pages may take.
        alloc_timeout_s: how long a receiver may leave a sender without pages. LMCache's
            ``pd_allocation_timeout_sec`` holds too, where it is shorter.
        lease_s: how long KV that nobody fetches is kept where its pages are needed.
        receive_timeout_s: how long a request whose legs are sent at once waits for its KV in the
            decode engine, before that computes it.
        storage_bytes: of the storage plug-in's pool of this rank.
        storage_listen: ``host:port`` of each rank, where other engines find what it holds; empty
            where none do.
        storage_peers: for each other engine the ``host:port`` of its ranks.
        storage_copies: ``local`` keeps KV here; ``peers`` writes it to one of the peers too.
    """

    transport: str = "auto"
    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    num_sms: Annotated[int, Meta(ge=0, le=4096)] = 0
    key_file: str | None = None
    peers: Literal["any", "kvxfer"] = "any"
    connect_timeout_s: Seconds = 10.0
    write_timeout_s: Seconds = 60.0
    alloc_timeout_s: Seconds = 120.0
    lease_s: Seconds = 120.0
    receive_timeout_s: Seconds = 120.0
    storage_bytes: Annotated[int, Meta(ge=1, lt=1 << 46)] = 1 << 30
    storage_listen: tuple[str, ...] = ()
    storage_peers: tuple[tuple[str, ...], ...] = ()
    storage_copies: Literal["local", "peers"] = "local"


def read_options(extra: Mapping[str, object] | None) -> Options:
    """The settings in an ``extra_config``, of which only keys with the prefix count.

    Raises:
        InvalidUsage: an unknown key or a value out of range.
    """
    own = {
        name.removeprefix(PREFIX): value
        for name, value in (extra or {}).items()
        if name.startswith(PREFIX)
    }
    try:
        return msgspec.convert(own, Options)
    except msgspec.ValidationError as error:
        known = ", ".join(PREFIX + name for name in Options.__struct_fields__)
        raise InvalidUsage(
            f"extra_config is not understood: {error}; known keys are {known}"
        ) from error
