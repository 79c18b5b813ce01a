"""The processes of all ranks, spoken to at the same time."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NoReturn, Protocol

import msgspec

from kvxfer.closing import Closing
from kvxfer.errors import ControlTimeout, KvxferError, PeerLost
from kvxfer.sweep import messages
from kvxfer.sweep.agent_process import AgentProcess

# The channel that carried an error of the far side, which is of no use to a reader here.
_CHANNEL = re.compile(r"^tcp://\S+: ")
# How often a call looks whether all processes live, those too that have no part in it.
_LOOK_S = 0.5
# How long others may still take once one has failed: they wait for its bytes at most that long.
_SETTLE_S = 90.0
# How long a process that a peer has missed may take to be seen ended by its parent.
_DEATH_S = 2.0


_START = partial(AgentProcess, wait=False)


class Member(Protocol):
    """One process of a team."""

    def wait_ready(self) -> None:
        """Wait until it serves; it was started without."""

    def call(self, message: msgspec.Struct) -> Any:
        """Send a message and wait for its reply."""

    def require_alive(self) -> None:
        """Raise PeerLost where it has ended."""

    def close(self) -> None:
        """End it."""


class RankTeam(Closing):
    """Processes that are started once and then are this or that rank. A context manager.

    Every call has the deadline of the agents' channel.
    """

    def __init__(self, size: int, start: Callable[[], Member] = _START) -> None:
        """Start ``size`` processes, and wait until all are ready.

        Raises:
            NotAvailable: one did not start.
        """
        self._executor = ThreadPoolExecutor(size, thread_name_prefix="kvxfer-rank")
        self._members: list[Member] = []
        self._lost = False
        try:
            # All at once: what takes its time is what each does until it is ready.
            for _ in range(size):
                self._members.append(start())
            for index, member in enumerate(self._members):
                _wait_ready(member, f"rank process {index} of {size}")
        except BaseException:
            self.close()
            raise

    def call(self, calls: Mapping[int, msgspec.Struct], names: Mapping[int, str]) -> list[Any]:
        """Send each process its message, all at once, and wait for all replies.

        Args:
            calls: the message to each process.
            names: what each process is at present, for errors.

        Returns:
            The replies, in the order of ``calls``.

        Raises:
            PeerLost: a process ended, one of ``calls`` or another; none is waited for.
            KvxferError: what the first agent raised that failed, with the name of the rank.
        """
        futures = {
            self._executor.submit(self._members[index].call, message): names[index]
            for index, message in calls.items()
        }
        try:
            failed = self._first_failure(futures, names)
            if failed is not None:
                self._raise_failure(failed, futures, names)
        except KvxferError:
            raise
        except BaseException:  # Ctrl-C: what they are at does not matter any more
            self._lost = True
            raise
        return [future.result() for future in futures]

    def release(self, indices: range, names: Mapping[int, str]) -> None:
        """Have processes free what they hold; nothing where one is lost or silent."""
        if not self._lost:
            self.call({index: messages.Release() for index in indices}, names)

    def require_alive(self) -> None:
        """Check that all processes run.

        Raises:
            PeerLost: one ended.
        """
        for member in self._members:
            member.require_alive()

    def close(self) -> None:
        """End all processes, also in the midst of their work; may be called more than once."""
        members, self._members = self._members, []
        # From threads, since each may take a second; those of the calls wait for their replies.
        with ThreadPoolExecutor(max(len(members), 1)) as closing:
            list(closing.map(lambda member: member.close(), members))
        self._executor.shutdown()

    def _first_failure(
        self, futures: Mapping["Future[Any]", str], names: Mapping[int, str]
    ) -> "Future[Any] | None":
        """The first call to fail; None once all are answered."""
        while True:
            done, left = wait(futures, _LOOK_S, return_when=FIRST_EXCEPTION)
            failed = next((one for one in done if one.exception() is not None), None)
            if failed is not None:
                return failed
            self._raise_dead(names)
            if not left:
                return None

    def _raise_failure(
        self,
        failed: "Future[Any]",
        futures: Mapping["Future[Any]", str],
        names: Mapping[int, str],
    ) -> NoReturn:
        error = failed.exception()
        if not isinstance(error, KvxferError):
            raise error or AssertionError("no failure")
        if isinstance(error, PeerLost | ControlTimeout):
            self._lost = True
            self._raise_dead(names, _DEATH_S if isinstance(error, PeerLost) else 0.0)
        else:
            self._settle(futures, names)
        text = _CHANNEL.sub("", str(error))
        raise type(error)(f"{futures[failed]}: {text}", error.code) from error

    def _settle(self, futures: Mapping["Future[Any]", str], names: Mapping[int, str]) -> None:
        """Wait for the others: the next row needs all of them at rest."""
        deadline = time.monotonic() + _SETTLE_S
        while wait(futures, _LOOK_S).not_done:
            self._raise_dead(names)
            if time.monotonic() >= deadline:
                self._lost = True
                return

    def _raise_dead(self, names: Mapping[int, str], timeout_s: float = 0.0) -> None:
        """Name the process that ended, where others only noticed it."""
        deadline = time.monotonic() + timeout_s
        while True:
            for name, member in self._named(names):
                try:
                    member.require_alive()
                except PeerLost as error:
                    self._lost = True
                    raise PeerLost(f"{name}: {error}") from error
            if time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def _named(self, names: Mapping[int, str]) -> Iterator[tuple[str, Member]]:
        for index, member in enumerate(self._members):
            yield names.get(index, f"rank process {index}, which has no part in this row"), member


def _wait_ready(member: Member, name: str) -> None:
    try:
        member.wait_ready()
    except KvxferError as error:
        raise type(error)(f"{name}: {error}", error.code) from error
