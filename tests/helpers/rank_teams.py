"""Ranks of a sweep as threads of this process, some of them faulty."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from kvxfer.layout import CopyPlan, KVLayout
from kvxfer.sweep import messages
from kvxfer.sweep.block_order import BlockOrder
from kvxfer.sweep.cases import pool_blocks
from kvxfer.sweep.ranks.agent import RankAgent
from kvxfer.sweep.ranks.cases import RankCase, RankSide
from kvxfer.sweep.ranks.rig import RankRig
from kvxfer.sweep.ranks.team import RankTeam
from kvxfer.transport import Op

MODEL = KVLayout(4, 4, head_dim=16, block_size=4)
HOST = ((-1,), (-1,))
# 10 tokens: the last block of a request is not full.
NUM_TOKENS = 10
Change = Callable[[CopyPlan], CopyPlan]


def side_of(name: str, layout: KVLayout, tp: int, pp: int) -> RankSide:
    count = layout.num_blocks(NUM_TOKENS)
    return RankSide(name, layout, tp, pp, count, pool_blocks(count, BlockOrder.parse("shuffled")))


def case_of(
    tp: tuple[int, int] = (2, 1),
    *,
    pp: tuple[int, int] = (1, 1),
    src: KVLayout = MODEL,
    dst: KVLayout = MODEL,
    op: str = "put",
) -> RankCase:
    """A row between threads, which copy over loopback."""
    return RankCase(
        transport="loopback",
        model="small",
        num_tokens=NUM_TOKENS,
        src=side_of("source", src, tp[0], pp[0]),
        dst=side_of("destination", dst, tp[1], pp[1]),
        block_order=BlockOrder.parse("shuffled"),
        memory="private",
        op=Op(op),
        num_sms=0,
    )


class LocalMember:
    """A rank in this process."""

    def __init__(self, agent: RankAgent) -> None:
        self.agent = agent
        self._lock = threading.Lock()

    def wait_ready(self) -> None:
        pass

    def call(self, message: msgspec.Struct) -> Any:
        with self._lock:
            return self.agent.call(message)

    def require_alive(self) -> None:
        pass

    def close(self) -> None:
        self.agent.close()


class FaultyAgent(RankAgent):
    """Changes its plans of requests behind the back of whoever counts them, from ``start`` on."""

    def __init__(self, change: Change, start: int = 0) -> None:
        super().__init__()
        self._change = change
        self._left = start

    def _plan_request(self, message: messages.PlanRequest) -> messages.Planned:
        planned = super()._plan_request(message)
        self._left -= 1
        if self._left < 0:
            self._plans = [(peer, self._change(plan)) for peer, plan in self._plans]
        return planned


class FaultyLimitAgent(RankAgent):
    """The same for the contiguous copies of the limit."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    def _plan_ranges(self, message: messages.PlanRanges) -> messages.Planned:
        planned = super()._plan_ranges(message)
        self._plans = [(peer, self._change(plan)) for peer, plan in self._plans]
        return planned


def team_of(size: int, faulty: dict[int, RankAgent] | None = None) -> RankTeam:
    """A team of threads, where ``faulty`` names members that are not healthy."""
    members = [LocalMember((faulty or {}).get(index) or RankAgent()) for index in range(size)]
    left = iter(members)
    return RankTeam(size, lambda: next(left))


def rig_of(case: RankCase, team: RankTeam) -> RankRig:
    return RankRig(case, team, num_threads=1, devices=HOST)


# Faults of a plan.


def copies_nothing(plan: CopyPlan) -> CopyPlan:
    return replace(plan, boxes=())


def swaps_two_blocks(plan: CopyPlan) -> CopyPlan:
    segments = plan.segments.copy()
    segments[[0, 1], 1] = segments[[1, 0], 1]
    return replace(plan, segments=segments)


def swaps_two_planes(plan: CopyPlan) -> CopyPlan:
    planes = plan.dst_planes.copy()
    planes[[0, -1]] = planes[[-1, 0]]
    return replace(plan, dst_planes=planes)


def shifts_one_token(plan: CopyPlan) -> CopyPlan:
    """In the last segment, which is not a full block: it ends in a slot that is not its own."""
    segments = plan.segments.copy()
    segments[-1, 3] += 1
    return replace(plan, segments=segments)


def leaves_the_last_bytes_out(plan: CopyPlan) -> CopyPlan:
    boxes = [box._replace(run_bytes=box.run_bytes - 2) for box in plan.boxes]
    return replace(plan, boxes=tuple(boxes))


def swaps_heads(num_bytes: int) -> Change:
    """Writes where the head that lies so many bytes behind belongs."""

    def change(plan: CopyPlan) -> CopyPlan:
        step = np.uint64(num_bytes % (1 << 64))
        return replace(plan, dst_planes=plan.dst_planes + step)

    return change


def writes_a_block_too_many(pool: int) -> Change:
    """Copies its first block into one more, which is not of the request."""

    def change(plan: CopyPlan) -> CopyPlan:
        extra = plan.segments[:1].copy()
        extra[0, 1] = np.setdiff1d(np.arange(pool, dtype=np.uint32), plan.segments[:, 1])[0]
        boxes = plan.boxes
        last = len(plan.segments)
        return replace(
            plan,
            segments=np.concatenate([plan.segments, extra]),
            boxes=(*boxes, boxes[0]._replace(first_segment=last, num_segments=1)),
        )

    return change
