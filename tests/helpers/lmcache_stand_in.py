"""A peer for lanes that moves nothing."""

import threading

from kvxfer.errors import PeerLost, TransferFailed
from kvxfer.transport import Op


class GivenUp:
    """What a link has given up and cannot end at once."""

    def __init__(self, peer: "Peer", polls_left: int) -> None:
        self._peer, self._polls_left = peer, polls_left

    def poll(self, timeout_s: float) -> bool:
        self._peer.calls.append("moves on")
        self._polls_left -= 1
        if self._polls_left:
            return False
        self._peer.given_up = None
        raise TransferFailed("it has ended")


class Peer:
    """A peer and its link: notes what is called, and fails where a test says so."""

    connection = "sender"

    def __init__(self) -> None:
        self.incarnation = "receiver"
        self.num_met = 0
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.sequence = 0
        self.polls_left = 0
        self.is_lost = False
        self.over = threading.Event()  # cleared, a transfer that was posted does not end
        self.over.set()
        self.given_up: GivenUp | None = None
        self.link = self.view = self
        self.addresses, self.num_blocks, self.num_bytes = {(0, 0): 1}, 8, 4096
        self.actual_path = "nowhere"

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.failing:
            raise self.failing[call]

    def require_open(self) -> None:
        if self.is_lost:
            raise PeerLost("planted")

    def post(self, plan: str, op: Op, **_: object) -> "Peer":
        self._note(f"post {plan}")
        self.sequence += 1
        return self

    def poll(self, timeout_s: float) -> bool:
        self._note(f"poll {self.sequence}")
        self.polls_left -= 1
        return self.polls_left < 0 and self.over.wait(timeout_s)

    def commit(self, grant: str, sequence: int) -> None:
        self._note(f"commit {grant} {sequence}")

    def abort(self, grant: str) -> None:
        self._note(f"abort {grant}")

    def connect(self, *_: object, **__: object) -> "Peer":
        self.num_met += 1
        return self

    def close(self) -> None:
        self._note("close")
