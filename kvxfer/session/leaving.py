"""How a sender parts from a peer that may live on."""

import logging

from kvxfer.control import LeaveRequest
from kvxfer.control.calls import Answer, Calls, Line
from kvxfer.errors import ControlTimeout, NotAvailable, PeerLost
from kvxfer.session.peer import Peer

_log = logging.getLogger(__name__)
_CALL_S = 1.0
_NUM_LEAVE_CALLS = 600


class Leaving:
    """Tells a peer that a connection has unmapped it, until it answers or its process has ended."""

    def __init__(self, calls: Calls, line: Line, peer: Peer) -> None:
        """Begin, by a line that is closed at the end; it keeps itself alive by the open call."""
        self._calls = calls
        self._peer = peer
        self._num_left = _NUM_LEAVE_CALLS
        self._line = line
        line.on_lost = None
        self._ask()

    def _ask(self) -> None:
        if self._num_left == 0 or end_of(self._peer) is not None:
            self._end()
            return
        self._num_left -= 1
        self._line.start(
            LeaveRequest(self._peer.connection), deadline_s=_CALL_S, on_answer=self._take
        )

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, ControlTimeout | PeerLost):
            self._ask()
        else:
            self._end()

    def _end(self) -> None:
        self._calls.drop(self._line)
        # Only now, so that the next connection of that name is not taken for the one that left.
        self._peer.give_back_name()


def end_of(peer: Peer) -> PeerLost | None:
    """Why a peer stands no more; of one that cannot be looked at now that is not said."""
    try:
        peer.link.require_open()
    except PeerLost as error:
        return error
    except NotAvailable as error:  # as for want of a descriptor
        _log.info("peer %s: %s", peer.incarnation, error)
    return None
