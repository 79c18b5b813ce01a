"""The registrations of one agent, and the words by which others see that they still stand.

The ledger is a shared segment: a secret, then a word a registration, which is its stamp for as long
as it stands and 0 afterwards. A peer maps the segment once and looks before each transfer, so that
what was deregistered is refused without a message.
"""

import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.closing import Closing
from kvxfer.connectors.nixl_agent.facts import (
    MAX_REGIONS,
    SECRET_BYTES,
    AgentFacts,
    RegionFacts,
)
from kvxfer.errors import RegistrationError
from kvxfer.memory import Buffer, MemoryKind, Registration, create_segment, find_segment, register
from kvxfer.memory.ipc import DeviceExport
from kvxfer.transport.process import ProcessSpec
from kvxfer.transport.shm import SegmentSpec

SECRET_WORDS = SECRET_BYTES // 8


class Span(NamedTuple):
    """A range as NIXL registers it.

    Attributes:
        kind: host or device memory.
        device: NIXL's device id; of a GPU, CUDA's index.
        address: first byte.
        num_bytes: length.
    """

    kind: MemoryKind
    device: int
    address: int
    num_bytes: int


class _Entry:
    def __init__(self, facts: RegionFacts, registration: Registration, keep: object) -> None:
        self.facts = facts
        self.registration = registration
        self.keep = keep  # what makes it openable by others
        self.count = 1


class Ledger(Closing):
    """What is registered here. All methods may be called from several threads."""

    def __init__(self) -> None:
        self._segment = create_segment((SECRET_WORDS + MAX_REGIONS) * 8)
        words = np.frombuffer(self._segment, np.uint64)  # type: ignore[call-overload]
        self._secret = secrets.token_bytes(SECRET_BYTES)
        words[:SECRET_WORDS] = np.frombuffer(self._secret, np.uint64)
        self.words: NDArray[np.uint64] = words[SECRET_WORDS : SECRET_WORDS + MAX_REGIONS]
        self._free = list(range(MAX_REGIONS - 1, -1, -1))
        self._entries: dict[Span, _Entry] = {}
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Enter a registration; again for the same raises a count.

        Raises:
            KvxferError: the memory cannot be given to others, and why; it is not entered.
        """
        with self._lock:
            found = self._entries.get(span)
            if found is not None:
                found.count += 1
                return
            if not self._free:
                raise RegistrationError(
                    f"{MAX_REGIONS} ranges are registered, which is the limit; register larger ones"
                )
            buffer = Buffer(
                span.address,
                span.num_bytes,
                span.kind,
                span.device if span.kind is MemoryKind.DEVICE else -1,
                None,
            )
            registration = register(buffer)
            try:
                facts, keep = _describe(span, registration, self._free[-1])
            except BaseException:
                registration.close()
                raise
            self._entries[span] = _Entry(facts, registration, keep)
            self.words[self._free.pop()] = facts.stamp

    def remove(self, span: Span) -> None:
        """End one :meth:`add`; nothing where there was none."""
        with self._lock:
            entry = self._entries.get(span)
            if entry is None:
                return
            entry.count -= 1
            if entry.count == 0:
                del self._entries[span]
                self._strike(entry)
                self._free.append(entry.facts.slot)

    def spans(self) -> list[Span]:
        """What is registered."""
        with self._lock:
            return list(self._entries)

    def regions(self, kind: MemoryKind, device: int) -> list[RegionFacts]:
        """What is registered of one memory, by address."""
        with self._lock:
            found = [
                entry.facts
                for span, entry in self._entries.items()
                if (span.kind, span.device) == (kind, device)
            ]
        return sorted(found, key=lambda region: region.address)

    def facts(self, spans: Iterable[Span] | None = None) -> AgentFacts:
        """What others are told, of all registrations or of these."""
        with self._lock:
            wanted = self._entries if spans is None else set(spans) & set(self._entries)
            regions = [self._entries[span].facts for span in wanted]
        return AgentFacts(
            process=ProcessSpec.own(),
            ledger_fd=self._segment.fd,
            ledger_bytes=self._segment.num_bytes,
            ledger_address=self._segment.address,
            secret=self._secret,
            regions=regions,
        )

    def close(self) -> None:
        """Strike every registration; may be called more than once."""
        with self._lock:
            while self._entries:
                self._strike(self._entries.popitem()[1])

    def _strike(self, entry: _Entry) -> None:
        self.words[entry.facts.slot] = 0
        entry.keep = None
        entry.registration.close()


class Standing:
    """Whether registrations still stand, by their words in a ledger."""

    def __init__(self, words: NDArray[np.uint64], regions: Sequence[RegionFacts]) -> None:
        self._words = words
        self._slots = np.array([region.slot for region in regions], np.intp)
        self._stamps = np.array([region.stamp for region in regions], np.uint64)

    def __bool__(self) -> bool:
        return bool((self._words[self._slots] == self._stamps).all())


def _describe(span: Span, registration: Registration, slot: int) -> tuple[RegionFacts, object]:
    stamp = secrets.randbelow((1 << 63) - 1) + 1
    fields = (span.address, span.num_bytes, span.device, slot, stamp)
    if span.kind is MemoryKind.DEVICE:
        exported = DeviceExport(registration)
        return RegionFacts(*fields, exported=exported.spec), exported
    found = find_segment(span.address, span.num_bytes)
    if found is None:
        return RegionFacts(*fields), None
    segment, offset = found
    return RegionFacts(*fields, segment=SegmentSpec(segment.fd, segment.num_bytes, offset)), segment


def map_ledger(facts: AgentFacts) -> tuple[_core.SharedSegment, NDArray[np.uint64]]:
    """Map another agent's ledger; returns the mapping and the words.

    The secret in it proves that the process of this host with that id is the one that wrote
    ``facts``: neither another host nor another process has it there.

    Raises:
        KvxferError: it is not there, or not that agent's.
    """
    facts.process.require_alive()
    segment = _core.SharedSegment.open(facts.process.pid, facts.ledger_fd, facts.ledger_bytes)
    words = np.frombuffer(segment, np.uint64)  # type: ignore[call-overload]
    found = words[:SECRET_WORDS].tobytes()
    if words.size < SECRET_WORDS + MAX_REGIONS or not secrets.compare_digest(found, facts.secret):
        raise RegistrationError(
            f"descriptor {facts.ledger_fd} of process {facts.process.pid} is not the ledger of the "
            "agent whose metadata names it; exchange metadata again"
        )
    return segment, words[SECRET_WORDS : SECRET_WORDS + MAX_REGIONS]
