"""Posts copies to a link without waiting for them, whatever the link itself does."""

import queue
import threading
from collections.abc import Callable
from functools import partial

from kvxfer.layout import CopyPlan
from kvxfer.transport import After, Link, Op, Transfer, Tuning

# One that runs, and one that follows it without a gap.
_MAX_POSTED = 2
_END_S = 1.0


class Poster:
    """What a sender posts to one link by.

    A link that copies in ``post`` (`Link.copies_in_post`) may take as long as its peer and the
    network do, so its posts run in a thread of their own, one after another. All methods are of the
    sender's thread.

    Attributes:
        tells: whether ``tell`` is called at the end of each copy; else only a look shows it.
    """

    def __init__(self, link: Link, tell: Callable[[], object]) -> None:
        """To ``link``; its thread begins with the first post that needs one."""
        self.tells = link.copies_in_post
        self._link, self._tell = link, tell
        self._posted: queue.SimpleQueue[PostedTransfer | None] = queue.SimpleQueue()
        self._in_flight: list[PostedTransfer] = []
        self._thread: threading.Thread | None = None

    @property
    def is_full(self) -> bool:
        """Whether another :meth:`post` would have to wait for earlier copies."""
        return self._num_in_flight >= _MAX_POSTED or self._link.is_full

    def post(self, plan: CopyPlan, op: Op, *, tuning: Tuning | None, after: After) -> Transfer:
        """Start ``plan``; see :meth:`Link.post`, whose errors may come with the transfer's end."""
        post = partial(self._link.post, plan, op, tuning=tuning, after=after)
        if not self.tells:
            return post()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvxfer-poster", daemon=True)
            self._thread.start()
        posted = PostedTransfer(post, plan.total_bytes, self._link.path)
        self._in_flight.append(posted)
        self._posted.put(posted)
        return posted

    def close(self) -> None:
        """Take no more; the thread ends with the last copy, which is not waited for."""
        self._posted.put(None)
        if self._thread is not None and not self._num_in_flight:
            self._thread.join(_END_S)

    @property
    def _num_in_flight(self) -> int:
        self._in_flight = [one for one in self._in_flight if not one.has_ended]
        return len(self._in_flight)

    def _run(self) -> None:
        while (posted := self._posted.get()) is not None:
            posted.run()
            del posted  # and with it the plan, before the next comes
            self._tell()


class PostedTransfer(Transfer):
    """A copy whose post waits its turn, or runs.

    ``sequence`` is 0 and ``actual_path`` the link's until it has ended.
    """

    def __init__(self, post: Callable[[], Transfer], num_bytes: int, path: str) -> None:
        """Of ``num_bytes``, by ``post``."""
        self.num_bytes, self.actual_path, self.sequence = num_bytes, path, 0
        self._post: Callable[[], Transfer] | None = post
        self._transfer: Transfer | None = None
        self._error: Exception | None = None
        self._ended = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the post has, well or not."""
        return self._ended.is_set()

    def run(self) -> None:
        """Post, in the thread that may wait."""
        assert self._post is not None
        try:
            transfer = self._transfer = self._post()
            self.sequence, self.num_sms = transfer.sequence, transfer.num_sms
            self.actual_path = transfer.actual_path
        except Exception as error:
            self._error = error
        finally:
            self._post = None
            self._ended.set()

    def poll(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s``; raises what the post or the copy ended with."""
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return self._transfer is not None and self._transfer.poll(0.0)
