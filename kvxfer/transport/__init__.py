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
from kvxfer.transport.registry import TRANSPORTS, available_transports, create_transport

__all__ = [
    "TRANSPORTS",
    "Availability",
    "Board",
    "Capabilities",
    "Export",
    "Link",
    "Op",
    "Transfer",
    "Transport",
    "Tuning",
    "available_transports",
    "create_transport",
]
