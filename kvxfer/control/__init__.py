"""Who a peer is, where its pages are, and who may write them. See PROTOCOL.md."""

from kvxfer.control.channel import ControlClient, ControlServer, Handlers
from kvxfer.control.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    CommitRequest,
    Done,
    ErrorReply,
    InitReply,
    InitRequest,
    LayoutSpec,
    LeaveRequest,
    PlaneSpec,
    ReserveReply,
    ReserveRequest,
    decode,
    encode,
)

__all__ = [
    "PROTOCOL_VERSION",
    "AbortRequest",
    "CommitRequest",
    "ControlClient",
    "ControlServer",
    "Done",
    "ErrorReply",
    "Handlers",
    "InitReply",
    "InitRequest",
    "LayoutSpec",
    "LeaveRequest",
    "PlaneSpec",
    "ReserveReply",
    "ReserveRequest",
    "decode",
    "encode",
]
