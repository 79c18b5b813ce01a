"""One rank that copies: it plans, starts at an instant that all ranks share, and says when it was.

CLOCK_MONOTONIC is one clock for all processes of a host, so instants of different ranks compare.
"""

import time
from contextlib import ExitStack

from kvxfer.errors import InvalidUsage
from kvxfer.layout import BlockMap, CopyPlan, ToFp8
from kvxfer.session import Peer, PeerGroup
from kvxfer.sweep import messages
from kvxfer.sweep.agent import Agent, as_ids
from kvxfer.sweep.wake import WAKE_BYTES, Scratch, run_wake
from kvxfer.transport import Op, Tuning, tuned

TRANSFER_TIMEOUT_S = 60.0
# A sleep may end this late; the rest of the wait spins.
_SPIN_NS = 100_000


class RankAgent(Agent):
    """An agent that also copies."""

    def __init__(self) -> None:
        super().__init__()
        self._group: PeerGroup | None = None
        self._op = Op.PUT
        self._plans: list[tuple[int, CopyPlan]] = []
        self._scratch: Scratch | None = None
        self.handlers = {
            **self.handlers,
            messages.Connect: self._connect,
            messages.PlanRequest: self._plan_request,
            messages.PlanRanges: self._plan_ranges,
            messages.Start: self._start,
        }

    def close(self) -> None:
        """Disconnect and free everything; may be called more than once."""
        group, self._group = self._group, None
        self._plans = []
        with ExitStack() as stack:
            stack.callback(super().close)
            if group is not None:
                stack.callback(group.close)

    def _connect(self, message: messages.Connect) -> messages.Connected:
        _, endpoint = self._prepared()
        convert = ToFp8() if message.converts else None
        with tuned.using(self._tuning):
            self._group = endpoint.connect_all(message.addresses, convert=convert)
        self._op = Op(message.op)
        self._scratch = Scratch(self._device, WAKE_BYTES * self._num_threads)
        limits = [peer.link.physical_limit_gb_per_s for peer in self._group.peers]
        return messages.Connected(physical_limits_gb_per_s=limits)

    def _connected(self) -> PeerGroup:
        if self._group is None:
            raise InvalidUsage("nothing is connected; send Connect first")
        return self._group

    def _plan_request(self, message: messages.PlanRequest) -> messages.Planned:
        group = self._connected()
        own, other = as_ids(message.own_ids), as_ids(message.other_ids)
        tables = (own, other) if self._op is Op.PUT else (other, own)
        first = group.peers[0].route(self._op)
        start = time.perf_counter_ns()
        blocks = BlockMap(
            *tables,
            src_block_size=first.src.layout.block_size,
            dst_block_size=first.dst.layout.block_size,
            tokens=range(message.num_tokens),
        )
        plans = [peer.plan_matched(self._op, blocks) for peer in group.peers]
        plan_us = (time.perf_counter_ns() - start) / 1e3
        self._plans = [(index, plan) for index, plan in enumerate(plans) if plan.num_pages]
        return self._planned(plan_us)

    def _plan_ranges(self, message: messages.PlanRanges) -> messages.Planned:
        pool, _ = self._prepared()
        peers = self._connected().peers
        self._plans = []
        for index, own, other in message.copies:
            here = pool.start_address + own.offset_bytes
            there = int(peers[index].view.addresses[0, 0]) + other.offset_bytes
            src, dst = (here, there) if self._op is Op.PUT else (there, here)
            self._plans.append((index, CopyPlan.contiguous(src, dst, own.num_bytes)))
        return self._planned(0.0)

    def _planned(self, plan_us: float) -> messages.Planned:
        return messages.Planned(
            plan_us=plan_us, plans=[_described(index, plan) for index, plan in self._plans]
        )

    def _start(self, message: messages.Start) -> messages.Ran:
        peers = self._connected().peers
        given = Tuning(message.engine, message.num_sms)
        work = []
        for index, plan in self._plans:
            link = peers[index].link
            work.append((link, plan, link.limit_tuning() if message.as_limit else given))
        for index, _ in self._plans[:1]:
            self._wake(peers[index])
        late = time.monotonic_ns() > message.at_ns
        _wait_until(message.at_ns)
        begin_ns = time.monotonic_ns()
        transfers = [link.post(plan, self._op, tuning=tuning) for link, plan, tuning in work]
        posted_ns = time.monotonic_ns()
        for transfer in transfers:
            transfer.wait(TRANSFER_TIMEOUT_S)
        end_ns = time.monotonic_ns()
        return messages.Ran(
            late=late,
            begin_ns=begin_ns,
            posted_ns=posted_ns,
            end_ns=end_ns,
            paths=sorted({transfer.actual_path for transfer in transfers}),
            num_sms=max((transfer.num_sms for transfer in transfers), default=0),
        )

    def _wake(self, peer: Peer) -> None:
        """By reads alone: a write could come after another rank's request and spoil it."""
        if self._scratch is None:
            raise InvalidUsage("nothing is connected; send Connect first")
        num_bytes = min(self._scratch.num_bytes, peer.view.span_bytes)
        there = int(peer.view.addresses[0, 0])
        plan = CopyPlan.contiguous(there, self._scratch.address, num_bytes)
        run_wake(peer.link, plan, Op.GET, TRANSFER_TIMEOUT_S)


def _wait_until(at_ns: int) -> None:
    left_ns = at_ns - time.monotonic_ns() - _SPIN_NS
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
    while time.monotonic_ns() < at_ns:
        pass


def _described(index: int, plan: CopyPlan) -> messages.PeerPlan:
    runs: dict[int, int] = {}
    for box in plan.boxes:
        runs[box.run_bytes] = runs.get(box.run_bytes, 0) + box.num_runs
    return messages.PeerPlan(
        peer=index, num_bytes=plan.total_bytes, num_pages=plan.num_pages, runs=runs
    )
