"""Sessions: requests between a sender and a receiver, and the connections that they stand on."""

from kvxfer.session.endpoint import Endpoint
from kvxfer.session.offers import Deferred, Granted, Notice, Offer, Refused
from kvxfer.session.peer import Peer
from kvxfer.session.peer_group import GroupTransfer, PeerGroup
from kvxfer.session.receiver import Receiver
from kvxfer.session.send_handle import LayerHandle, SendHandle
from kvxfer.session.sender import Sender
from kvxfer.session.states import ReceiveLimits, SendLimits

__all__ = [
    "Deferred",
    "Endpoint",
    "Granted",
    "GroupTransfer",
    "LayerHandle",
    "Notice",
    "Offer",
    "Peer",
    "PeerGroup",
    "ReceiveLimits",
    "Receiver",
    "Refused",
    "SendHandle",
    "SendLimits",
    "Sender",
]
