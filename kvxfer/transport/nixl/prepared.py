"""A transfer of NIXL's, from its lists to its end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvxfer.errors import PeerLost
from kvxfer.transport.nixl.wire import Message

if TYPE_CHECKING:
    from kvxfer.transport.nixl.agent import Agent

_SOUND = ("PROC", "DONE")


class Prepared:
    """A transfer that may be posted again and again, one at a time."""

    def __init__(self, agent: "Agent", name: str, handle: Any, lists: tuple[Any, Any]) -> None:
        self._agent, self._name, self._handle, self._lists = agent, name, handle, lists
        self._state = "DONE"

    def post(self, message: Message | None = None) -> None:
        """Start it; ``message`` arrives once the bytes are visible at the far side."""
        with self._agent.entered() as nixl, lost(self._name):
            data = b"" if message is None else message.encode()
            self._state = "ERR"  # where the next line raises
            self._state = nixl.transfer(self._handle, data)
        self._require_sound()

    def poll(self) -> bool:
        """Whether it has ended.

        Raises:
            PeerLost: it failed.
        """
        if self._state == "PROC":
            with self._agent.entered() as nixl, lost(self._name):
                self._state = "ERR"  # where the next line raises
                self._state = nixl.check_xfer_state(self._handle)
            self._require_sound()
        return self._state == "DONE"

    def is_settled(self) -> bool:
        """Whether nothing of it moves any more, well or not."""
        try:
            return self.poll()
        except PeerLost:
            return self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether NIXL ended it without delivering."""
        return self._state not in _SOUND

    def _require_sound(self) -> None:
        if self.has_failed:
            raise PeerLost(f"NIXL ended a transfer with {self._name} as {self._state}")

    def release(self) -> bool:
        """Give it back; False where NIXL still works on it, and its memory must stay.

        NIXL would only cancel it, forget it, and write all the same.
        """
        if self._state == "PROC":
            return False
        try:
            with self._agent.entered() as nixl:
                nixl.release_xfer_handle(self._handle)
                for one in self._lists:
                    nixl.release_dlist_handle(one)
        except Exception:
            return False
        return True


@contextmanager
def lost(name: str) -> Iterator[None]:
    """Have what NIXL says of an agent that it does not reach be a `PeerLost`."""
    try:
        yield
    except PeerLost:
        raise
    except Exception as error:  # NIXL's bindings have exceptions of their own
        raise PeerLost(f"NIXL's agent {name} is not reached: {error}") from error
