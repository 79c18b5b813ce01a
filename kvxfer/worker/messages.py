"""What a decode worker is asked on its third channel, ``worker``: its addresses, and its checks."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer.control import LayoutSpec

_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, Meta(max_length=4096)]


class AskWorker(msgspec.Struct, frozen=True, tag="worker_ask"):
    """Who is there?"""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, tag="worker_info"):
    """The channels of a worker by name, the transport that it serves and the model that it has.

    ``transport`` is ``auto`` where the sender may choose; ``memory`` says of which, host or device.
    """

    addresses: dict[str, _Text]
    transport: _Text
    layout: LayoutSpec
    tp_size: _Count
    pp_size: _Count
    memory: _Text = ""


class AskOutcome(msgspec.Struct, frozen=True, tag="worker_ask_outcome"):
    """How did a request end? It is answered once it has."""

    request_id: _Text


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag="worker_outcome"):
    """How a request ended.

    ``num_checked_bytes`` of it were compared, 0 where the worker does not know what belongs there.
    ``wrong`` says what is wrong with it, and is empty where all is well.
    """

    request_id: _Text
    num_checked_bytes: _Count
    wrong: _Text = ""
