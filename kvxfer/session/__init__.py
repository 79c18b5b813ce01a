"""Sessions: a cache that peers can reach, and a connection to one."""

from kvxfer.session.endpoint import Endpoint
from kvxfer.session.peer import Peer

__all__ = ["Endpoint", "Peer"]
