"""Who a peer is, where its pages are, and who may write them. See PROTOCOL.md."""

from kvxfer.control.client import ControlClient
from kvxfer.control.deferred import DeferredReply
from kvxfer.control.framing import PROTOCOL_VERSION, decode, encode
from kvxfer.control.key import SharedKey
from kvxfer.control.messages import (
    AbortRequest,
    CommitRequest,
    Done,
    ErrorReply,
    InitReply,
    InitRequest,
    LayoutSpec,
    LeaveRequest,
    PlaneSpec,
    RankSpec,
    ReserveReply,
    ReserveRequest,
    TableSpec,
    WatchReply,
    WatchRequest,
)
from kvxfer.control.ports import Ports
from kvxfer.control.server import ControlServer, Handlers

__all__ = [
    "PROTOCOL_VERSION",
    "AbortRequest",
    "CommitRequest",
    "ControlClient",
    "ControlServer",
    "DeferredReply",
    "Done",
    "ErrorReply",
    "Handlers",
    "InitReply",
    "InitRequest",
    "LayoutSpec",
    "LeaveRequest",
    "PlaneSpec",
    "Ports",
    "RankSpec",
    "ReserveReply",
    "ReserveRequest",
    "SharedKey",
    "TableSpec",
    "WatchReply",
    "WatchRequest",
    "decode",
    "encode",
]
