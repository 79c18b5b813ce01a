"""Transports: one file each, behind :class:`kvxfer.transport.base.Transport`."""

from kvxfer.transport.base import (
    Availability,
    Capabilities,
    Export,
    Link,
    Op,
    Transfer,
    Transport,
    Tuning,
)
from kvxfer.transport.board import Board
from kvxfer.transport.choice import TransportOffers, Transports
from kvxfer.transport.registry import (
    TRANSPORTS,
    available_transports,
    candidates,
    choose,
    create_transport,
)
from kvxfer.transport.stream_mark import After, StreamMark, mark

__all__ = [
    "TRANSPORTS",
    "After",
    "Availability",
    "Board",
    "Capabilities",
    "Export",
    "Link",
    "Op",
    "StreamMark",
    "Transfer",
    "Transport",
    "TransportOffers",
    "Transports",
    "Tuning",
    "available_transports",
    "candidates",
    "choose",
    "create_transport",
    "mark",
]
