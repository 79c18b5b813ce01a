"""The paged copy on a GPU, shared by the transports that move device memory."""

import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.errors import InvalidUsage, KvxferError, TransferTimeout
from kvxfer.layout import CopyPlan
from kvxfer.layout.copy_plan import CopyBox
from kvxfer.transport import tuned
from kvxfer.transport.base import Link, Op, Transfer, Tuning
from kvxfer.transport.board import PeerSlot
from kvxfer.transport.host_copy import plan_tables
from kvxfer.transport.stream_mark import After, mark
from kvxfer.tuning import NO_SECTION, Section

ENGINES = {
    "auto": _core.CopyEngine.AUTO,
    "bulk": _core.CopyEngine.BULK,
    "load_store": _core.CopyEngine.LOAD_STORE,
    "dma": _core.CopyEngine.DMA,
}
# Eight SMs already carry 0.88 (put) to 0.92 (get) of an NVLink rate on H200s and leave the rest of
# the GPU to the engine; all 132 add a few per cent.
DEFAULT_NUM_SMS = 8
# Shorter runs, as where single heads are picked or transposed, reach 0.5 to 0.8 of the limit with 8
# and 0.8 to 0.9 with 16. Conversion computes as well: 0.31 with 8, 0.82 with 32, 0.92 with all.
_SHORT_RUN_BYTES = 512
_SHORT_RUN_NUM_SMS = 16
_CONVERT_NUM_SMS = 32
_BULK_ALIGNMENT_BYTES = 16
_STEPS = tuple(name for name in CopyBox._fields if name.endswith(("_stride", "_bytes")))
_CLOSE_S = 30.0
_SLICE_S = 0.2

_ENGINE_TEXT = {
    _core.CopyEngine.BULK: "bulk kernel",
    _core.CopyEngine.LOAD_STORE: "load/store kernel",
    _core.CopyEngine.DMA: "copy engine",
}


class _DeviceTransfer(Transfer):
    def __init__(
        self, link: "DeviceLink", sequence: int, num_bytes: int, path: str, num_sms: int
    ) -> None:
        self._link = link  # a link that nobody else holds must not unmap what is being copied
        self.sequence = sequence
        self.num_bytes = num_bytes
        self.actual_path = path
        self.num_sms = num_sms

    def poll(self, timeout_s: float) -> bool:
        return self._link.wait(self.sequence, timeout_s)


class DeviceLink(Link):
    """A link whose copies run on one GPU of this process, in order."""

    def __init__(
        self,
        device: int,
        slot: PeerSlot,
        *,
        region_addresses: NDArray[np.uint64],
        region_bytes: Sequence[int],
        path: str,
        section: Section = NO_SECTION,
    ) -> None:
        """Copy with GPU ``device``, by the profile's ``section``, and complete on ``slot``."""
        # The first attribute, so that it goes before the board that it writes to.
        self._copier = _core.DeviceCopier(device, slot.address, slot.num_slots)
        self._device = device
        self._section = section
        self.region_addresses = region_addresses
        self.region_bytes = region_bytes
        self.path = path
        self._slot = slot
        self._lock = threading.Lock()
        self._closed = False

    @property
    def copier(self) -> _core.DeviceCopier:
        """The native copier, for tests that plant faults and for tuning its kernel."""
        return self._copier

    def post(
        self,
        plan: CopyPlan,
        op: Op,
        *,
        tuning: Tuning | None = None,
        after: After = None,
    ) -> Transfer:
        """Queue ``plan`` on the link's stream; the direction is in the plan's addresses."""
        engine, num_sms = _run_by(plan, op, tuning or Tuning(), self._section)
        tables = plan_tables(plan)
        reached = mark(self._device, after)
        with self._lock:
            if self._closed:
                raise InvalidUsage("this link is closed; connect again")
            self._slot.require_open()
            # Before the call: whatever interrupts it, no number may be given to two copies.
            sequence = self._slot.next_sequence()
            try:
                # Positional, because this call stands in the latency of every transfer.
                used = self._copier.post(
                    tables,
                    self._slot.slot,
                    sequence,
                    num_sms,
                    engine,
                    _core.CopyFault.NONE,
                    reached,
                )
            except (KvxferError, TypeError):
                # Nothing was queued, and a refused post must not count as a transfer over there.
                self._slot.give_back_sequence()
                raise
        path = f"{self.path}, {_ENGINE_TEXT[used]} {op.value}"
        used_sms = 0 if used is _core.CopyEngine.DMA else num_sms
        return _DeviceTransfer(self, sequence, plan.total_bytes, path, used_sms)

    @property
    def is_full(self) -> bool:
        """Whether as many copies are in flight as may be."""
        oldest = self._slot.sequence + 1 - _core.DeviceCopier.MAX_IN_FLIGHT
        return oldest > 0 and not self.wait(oldest, 0.0)

    def wait(self, sequence: int, timeout_s: float) -> bool:
        """Wait until transfer ``sequence`` is complete; False at the deadline."""
        return self._copier.wait(self._slot.slot, sequence, timeout_s)

    def require_open(self) -> None:
        """Check the peer's process and its board."""
        with self._lock:
            self._slot.require_open()

    def limit_tuning(self) -> Tuning:
        """One copy by the copy engine."""
        return Tuning(engine="dma")

    def close(self) -> None:
        """Refuse later copies and wait for those in flight; Ctrl-C ends the wait.

        Raises:
            TransferTimeout: they did not end within half a minute; nothing was unmapped, and
                closing again waits again.
        """
        with self._lock:
            self._closed = True
            deadline = time.monotonic() + _CLOSE_S
            # In slices, because Python delivers signals (Ctrl-C) only between native calls.
            while not self.wait(
                self._slot.sequence, min(_SLICE_S, max(deadline - time.monotonic(), 0.0))
            ):
                if time.monotonic() < deadline:
                    continue
                raise TransferTimeout(
                    f"copies over {self.path} did not end within {_CLOSE_S} s; the peer's memory "
                    "stays mapped; close again once they have"
                )


def default_num_sms(plan: CopyPlan) -> int:
    """The fewest SMs that carry most of what the path can."""
    if plan.conversion != "none":
        return _CONVERT_NUM_SMS
    if any(box.run_bytes < _SHORT_RUN_BYTES for box in plan.boxes):
        return _SHORT_RUN_NUM_SMS
    return DEFAULT_NUM_SMS


def _run_by(
    plan: CopyPlan, op: Op, tuning: Tuning, section: Section
) -> tuple[_core.CopyEngine, int]:
    """Engine and SM budget.

    Raises:
        InvalidUsage: an unknown engine.
    """
    rule = tuned.rule_for(section, op.value, plan)
    engine = tuning.engine
    if engine == "auto" and (rule.engine != "bulk" or _is_aligned(plan)):
        engine = rule.engine
    if engine not in ENGINES:
        raise InvalidUsage(f"engine {engine!r} on device memory; use {', '.join(ENGINES)}")
    return ENGINES[engine], tuning.num_sms or rule.num_sms or default_num_sms(plan)


def _is_aligned(plan: CopyPlan) -> bool:
    """Whether every run begins and ends where the bulk kernel takes it."""
    planes = np.bitwise_or.reduce(plan.src_planes | plan.dst_planes, initial=np.uint64(0))
    bits = int(planes)
    for box in plan.boxes:
        for name in _STEPS:
            bits |= getattr(box, name)
    return bits % _BULK_ALIGNMENT_BYTES == 0
