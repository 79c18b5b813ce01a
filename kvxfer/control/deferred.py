"""An answer that a handler owes: completed later, from whatever thread knows it."""

import logging
import threading
from collections.abc import Callable

import msgspec

from kvxfer.control.framing import encode
from kvxfer.control.replies import error_frames
from kvxfer.errors import InvalidUsage, KvxferError

_log = logging.getLogger(__name__)

Frames = list[bytes]


class DeferredReply:
    """What a handler returns when the answer depends on something that has yet to happen.

    The server keeps serving meanwhile. The answer is owed until the caller's own deadline; a
    server keeps a bounded number of them for each caller and in all (PROTOCOL.md, "Limits").
    """

    def __init__(self, on_abandoned: Callable[[], object] | None = None) -> None:
        """Owe an answer.

        Args:
            on_abandoned: called once, on the server's thread, if the answer cannot reach the
                caller: its deadline has passed, it is gone, it does not read, too many answers are
                owed, or the server closes. What was set aside for it may then be given back. It
                may come after `complete` has returned True, where the caller goes in that moment.
        """
        self._on_abandoned = on_abandoned
        self._lock = threading.Lock()
        self._frames: Frames | None = None
        self._deliver: Callable[[Frames], None] | None = None
        self._abandoned = False

    @property
    def is_open(self) -> bool:
        """Whether the caller still waits and has not been answered."""
        return self._frames is None and not self._abandoned

    def complete(self, reply: msgspec.Struct) -> bool:
        """Answer with ``reply``; from any thread.

        Returns:
            Whether the answer was taken: False where there is one already or nobody waits any more.

        Raises:
            InvalidUsage: ``reply`` is no message or cannot be encoded; the answer is still owed.
        """
        if not isinstance(reply, msgspec.Struct):
            raise InvalidUsage(f"an answer is a message, not {reply!r}")
        return self._settle(encode(reply))

    def fail(self, error: KvxferError) -> bool:
        """Raise ``error`` at the caller; otherwise as `complete`."""
        return self._settle(error_frames(error))

    def attach(self, deliver: Callable[[Frames], None]) -> None:
        """The server's side: send the answer through ``deliver``, at once if there is one."""
        with self._lock:
            self._deliver = deliver
            frames = self._frames
        if frames is not None:
            deliver(frames)

    def abandon(self) -> None:
        """The server's side: nobody waits any more."""
        with self._lock:
            if self._abandoned:
                return
            self._abandoned = True
        if self._on_abandoned is not None:
            try:
                self._on_abandoned()
            except Exception:
                _log.exception("what was to be done about an answer that nobody waits for failed")

    def _settle(self, frames: Frames) -> bool:
        with self._lock:
            if not self.is_open:
                return False
            self._frames = frames
            deliver = self._deliver
        if deliver is not None:
            deliver(frames)
        return True
