"""Links with planted faults, and a load without a GPU, for the tests of the sweep's own checks."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvxfer.layout import CopyBox, CopyPlan
from kvxfer.sweep.rig import Rig
from kvxfer.transport import Op, Transfer, Tuning
from kvxfer.transport.base import FinishedTransfer


def is_wake(rig: Rig, plan: CopyPlan) -> bool:
    planes = (plan.src_planes[0], plan.dst_planes[0])
    return planes == (rig.wake_plan.src_planes[0], rig.wake_plan.dst_planes[0])


def is_request(plan: CopyPlan) -> bool:
    """Whether it copies blocks, not one range of bytes."""
    return any(box.src_block_stride for box in plan.boxes)


def with_boxes(plan: CopyPlan, change: Callable[[CopyBox], CopyBox]) -> CopyPlan:
    """The plan with every box changed."""
    return replace(plan, boxes=tuple(change(box) for box in plan.boxes))


class PlantedLink:
    """A link whose copies go wrong from copy number ``start`` on; those to wake are not counted."""

    def __init__(self, rig: Rig, start: int) -> None:
        self.rig = rig
        self.real = rig.peer.link
        self.left = start
        self.physical_limit_gb_per_s: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def post(self, plan: CopyPlan, op: Op, *, tuning: Tuning | None = None) -> Transfer:
        if is_wake(self.rig, plan):
            return self.real.post(plan, op)
        if self.left > 0:
            self.left -= 1
            return self.healthy(plan, op, tuning)
        return self.faulty(plan, op, tuning)

    def healthy(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        return self.real.post(plan, op, tuning=tuning)

    def faulty(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        raise NotImplementedError


class CopiesNothing(PlantedLink):
    def faulty(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        return FinishedTransfer(plan.total_bytes, "nowhere")


class SwapsTwoBlocks(PlantedLink):
    def faulty(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        segments = plan.segments.copy()
        segments[[0, -1], 1] = segments[[-1, 0], 1]
        return self.real.post(replace(plan, segments=segments), op, tuning=tuning)


class SwapsTwoPlanes(PlantedLink):
    def faulty(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        planes = plan.src_planes.copy()
        if planes.size > 1:
            planes[[0, -1]] = planes[[-1, 0]]
        return self.real.post(replace(plan, src_planes=planes), op, tuning=tuning)


class LeavesOneBlockOut(PlantedLink):
    def faulty(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        if len(plan.segments) > 1:
            plan = with_boxes(plan, lambda box: box._replace(num_segments=box.num_segments - 1))
        return self.real.post(plan, op, tuning=tuning)


class LeavesTheLastBytesOut(PlantedLink):
    def faulty(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        plan = with_boxes(plan, lambda box: box._replace(run_bytes=box.run_bytes - 8))
        return self.real.post(plan, op, tuning=tuning)


class WritesOneBlockTooMany(PlantedLink):
    def faulty(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        if is_request(plan):
            pool = np.arange(self.rig.spec.num_blocks, dtype=np.uint32)
            extra = plan.segments[:1].copy()
            extra[0, 1] = np.setdiff1d(pool, plan.segments[:, 1])[0]
            plan = replace(plan, segments=np.concatenate([plan.segments, extra]))
            plan = with_boxes(plan, lambda box: box._replace(num_segments=box.num_segments + 1))
        return self.real.post(plan, op, tuning=tuning)


class IsOneRoundStale(PlantedLink):
    """Sends what the source's pool held when the last copy was posted."""

    def __init__(self, rig: Rig, start: int) -> None:
        super().__init__(rig, start)
        buffer = rig.local.cache.registrations[0].buffer
        memory = (ctypes.c_uint8 * buffer.num_bytes).from_address(buffer.address)
        self.pool = np.frombuffer(memory, np.uint8)
        self.last = self.pool.copy()
        self.offset = np.uint64((self.last.ctypes.data - buffer.address) % (1 << 64))

    def healthy(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        self.last[:] = self.pool
        return super().healthy(plan, op, tuning)

    def faulty(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        stale = replace(plan, src_planes=plan.src_planes + self.offset)
        transfer = self.real.post(stale, op, tuning=tuning)
        self.last[:] = self.pool
        return transfer


class RecordingLink(PlantedLink):
    """Says in ``events`` what happens, the waits too; takes fills of the source from its rig."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(rig, 0)
        self.events: list[str] = []
        self.copies: list[tuple[str, CopyPlan]] = []
        for name in ("fill_source", "fill_source_prefix", "fill_destination", "require_delivered"):
            monkeypatch.setattr(rig, name, self.recorded(name, getattr(rig, name)))
        monkeypatch.setattr(rig.peer, "plan", self.recorded("plan", rig.peer.plan))

    def recorded(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.events.append(name)
            return act(*args)

        return call

    def post(self, plan: CopyPlan, op: Op, *, tuning: Tuning | None = None) -> Transfer:
        kind = "request"
        if is_wake(self.rig, plan):
            kind = "wake"
        elif not is_request(plan):
            kind = "limit"
        self.copies.append((kind, plan))
        self.events.append(kind)
        transfer = self.real.post(plan, op, tuning=tuning)
        if kind == "request":
            transfer.wait = self.recorded("wait", transfer.wait)
        return transfer


class FakeLoad:
    """A compute load without a GPU; says in ``events`` when it begins and ends."""

    events: list[str]

    def __init__(self, kind: str, device: int) -> None:
        assert (kind, device) == ("gemm", -1)
        self.events.append("load")

    def reset(self) -> None:
        self.events.append("reset")

    def median_us(self) -> float:
        return 2.0

    def close(self) -> float:
        self.events.append("load ends")
        return 3.0
