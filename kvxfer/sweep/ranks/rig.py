"""All ranks of a row, prepared and connected."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer.closing import Closing
from kvxfer.errors import ControlTimeout, VerificationError
from kvxfer.session.layouts import layout_spec, rank_spec
from kvxfer.sweep import messages
from kvxfer.sweep.host_memory import require_host_memory
from kvxfer.sweep.messages import ByteRange, Checked, PeerPlan, Planned, Ran
from kvxfer.sweep.ranks.cases import RankCase, RankSide
from kvxfer.sweep.ranks.limit import LimitCopy, limit_copies, physical_limit
from kvxfer.sweep.ranks.team import RankTeam
from kvxfer.transport import Op, Tuning

Ids = NDArray[np.int64]
# From the order to start until the instant: time for the order to reach all ranks.
_LEAD_NS = 3_000_000
_MAX_LEAD_NS = 2_000_000_000
# So many rounds in time halve it again. Few repeats: what is copied again is still in caches.
_CALM_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One round over all ranks that copy.

    Attributes:
        latency_us: from the first rank that began to post to the last that saw its data delivered.
        post_us: the longest posting of a rank.
        rank_us: the time of each rank.
        paths: what carried the bytes.
        num_sms: the largest SM budget of a copy.
    """

    latency_us: float
    post_us: float
    rank_us: tuple[float, ...]
    paths: tuple[str, ...]
    num_sms: int


class RankRig(Closing):
    """The ranks of one row, a process each. A context manager.

    Processes 0 .. P - 1 of the team are the sources, the next D the destinations.

    Attributes:
        case: the row.
        plans: for each rank that copies its plans to its peers, as it made them last.
    """

    def __init__(
        self,
        case: RankCase,
        team: RankTeam,
        *,
        num_threads: int,
        devices: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        """Allocate all pools and connect the ranks that copy to all of the other side.

        Args:
            case: the row.
            team: as many processes as it has ranks, or more.
            num_threads: threads of each rank's copies, fills and checks.
            devices: CUDA devices of the sources and of the destinations, taken in turn; (-1,) for
                host memory.

        Raises:
            LayoutMismatch: the layouts cannot be joined.
            NotAvailable: the transport does not work here, or memory is short.
            KvxferError: what else a rank raises, with its name.
        """
        self.case = case
        self._team = team
        self._lead_ns = _LEAD_NS
        self._num_in_time = 0
        num_sources = len(case.src.ranks)
        self._sources = range(num_sources)
        self._destinations = range(num_sources, num_sources + len(case.dst.ranks))
        put = case.op is Op.PUT
        self._copying = self._sources if put else self._destinations
        self._others = self._destinations if put else self._sources
        self._names = {
            first + index: f"{side.name} rank {index} of {len(side.ranks)}"
            for side, first in ((case.src, 0), (case.dst, num_sources))
            for index in range(len(side.ranks))
        }
        self._device_of = {
            index: side[place % len(side)]
            for side, ranks in zip(devices, (self._sources, self._destinations), strict=True)
            for place, index in enumerate(ranks)
        }
        self.plans: list[list[PeerPlan]] = []
        if case.memory != "device":
            require_host_memory(case.src.pool_bytes + case.dst.pool_bytes)
        with ExitStack() as stack:
            stack.callback(self._release)
            addresses = self._prepare(num_threads)
            self._connect([addresses[index] for index in self._others])
            self._stack = stack.pop_all()

    def fill_source(self, seed: int, block_ids: Ids | None = None) -> None:
        """Write the pattern of ``seed`` on all source ranks; None = all blocks."""
        ids = [] if block_ids is None else block_ids.tolist()
        self._tell(self._sources, messages.Fill(seed=seed, block_ids=ids))

    def fill_destination(self, seed: int) -> None:
        """Overwrite the pools of all destination ranks."""
        self._tell(self._destinations, messages.Fill(seed=seed))

    def plan_request(self, src_ids: Ids, dst_ids: Ids) -> float:
        """Have all copying ranks plan a request; the longest time in microseconds.

        Raises:
            VerificationError: the plans together do not move each byte once.
        """
        own, other = (src_ids, dst_ids) if self.case.op is Op.PUT else (dst_ids, src_ids)
        message = messages.PlanRequest(
            num_tokens=self.case.num_tokens, own_ids=own.tolist(), other_ids=other.tolist()
        )
        planned: list[Planned] = self._tell(self._copying, message)
        self.plans = [reply.plans for reply in planned]
        num_bytes = sum(plan.num_bytes for plans in self.plans for plan in plans)
        if num_bytes != self.case.total_bytes:
            raise VerificationError(
                f"all ranks together plan {num_bytes} bytes; the destinations hold "
                f"{self.case.total_bytes} of the request"
            )
        return max(reply.plan_us for reply in planned)

    def run_request(self, tuning: Tuning) -> RoundTimes:
        """Run what was planned on all copying ranks at one instant."""
        return self._run(lambda at_ns: _start(at_ns, tuning))

    def fill_limit_ranges(self, seed: int) -> None:
        """Write the pattern of ``seed`` where :meth:`run_limit` reads."""
        copies = self._limit_copies()
        self._call(
            {
                index: messages.FillRanges(seed=seed, ranges=_ranges(copies, source=place))
                for place, index in enumerate(self._sources)
            }
        )

    def run_limit(self) -> RoundTimes:
        """Copy what each pair of ranks moves as one contiguous range, all at one instant.

        By the fastest way that the path has.
        """
        copies = self._limit_copies()
        self._call(
            {
                index: messages.PlanRanges(copies=self._ranges_of(copies, place))
                for place, index in enumerate(self._copying)
            }
        )
        return self._run(lambda at_ns: messages.Start(at_ns=at_ns, as_limit=True))

    def require_delivered(self, seed: int, src_ids: Ids, dst_ids: Ids) -> None:
        """Check every byte of the request on every destination rank, by itself.

        Raises:
            VerificationError: a byte differs; names the rank and the place.
        """
        converts = self.case.convert is not None
        check = messages.Check(
            seed=seed,
            num_tokens=self.case.num_tokens,
            block_ids=dst_ids.tolist(),
            source_ids=src_ids.tolist(),
            source_block_size=self.case.src.layout.block_size,
            converted_from=self.case.src.layout.dtype if converts else "none",
        )
        self._judge(self._tell(self._destinations, check), "the request")

    def require_untouched(self, seed: int, dst_ids: Ids) -> None:
        """Check that all slots outside the request still hold ``seed`` on every destination rank.

        Raises:
            VerificationError: a byte was overwritten.
        """
        check = messages.CheckOutside(
            seed=seed, num_tokens=self.case.num_tokens, block_ids=dst_ids.tolist()
        )
        self._judge(self._tell(self._destinations, check), "slots outside the request")

    def require_limit(self, seed: int) -> None:
        """Check the contiguous copies on every destination rank.

        Raises:
            VerificationError: a byte differs.
        """
        copies = self._limit_copies()
        found = self._call(
            {
                index: messages.CheckRanges(seed=seed, ranges=_ranges(copies, destination=place))
                for place, index in enumerate(self._destinations)
            }
        )
        self._judge(found, "the contiguous copy")

    def physical_limit_gb_per_s(self) -> float | None:
        """What the hardware can carry of this traffic; None where nothing says so."""
        devices = [
            (self._device_of[copy.source], self._device_of[copy.destination + len(self._sources)])
            for copy in self._limit_copies()
        ]
        return physical_limit(self._limit_copies(), devices, self._link_limits)

    def close(self) -> None:
        """Free what the ranks hold; may be called more than once."""
        self._stack.close()

    def _prepare(self, num_threads: int) -> dict[int, dict[str, str]]:
        prepared = self._call(
            {
                index: self._prepare_message(side, place, index, num_threads)
                for side, ranks in (
                    (self.case.src, self._sources),
                    (self.case.dst, self._destinations),
                )
                for place, index in enumerate(ranks)
            }
        )
        return {index: reply.addresses for index, reply in enumerate(prepared)}

    def _prepare_message(
        self, side: RankSide, place: int, index: int, num_threads: int
    ) -> messages.Prepare:
        memory = self.case.memory
        if memory != "device" and index in self._copying:
            memory = "private"
        return messages.Prepare(
            layout=layout_spec(side.layout),
            rank=rank_spec(side.ranks[place]),
            num_blocks=side.pool_blocks,
            memory=memory,
            device=self._device_of[index],
            transport=self.case.transport,
            num_threads=num_threads,
            copy_threads=num_threads,
            tuning=self.case.tuning,
        )

    def _connect(self, addresses: list[dict[str, str]]) -> None:
        message = messages.Connect(
            addresses=addresses, op=self.case.op.value, converts=self.case.convert is not None
        )
        connected: list[messages.Connected] = self._tell(self._copying, message)
        self._link_limits = [
            limit for reply in connected for limit in reply.physical_limits_gb_per_s
        ]

    def _limit_copies(self) -> list[LimitCopy]:
        return limit_copies(self.plans, put=self.case.op is Op.PUT)

    def _ranges_of(
        self, copies: Sequence[LimitCopy], place: int
    ) -> list[tuple[int, ByteRange, ByteRange]]:
        """What the copying rank at ``place`` copies: (peer, bytes here, bytes there)."""
        if self.case.op is Op.PUT:
            return [
                (copy.destination, copy.source_range, copy.destination_range)
                for copy in copies
                if copy.source == place
            ]
        return [
            (copy.source, copy.destination_range, copy.source_range)
            for copy in copies
            if copy.destination == place
        ]

    def _run(self, start: Callable[[int], messages.Start]) -> RoundTimes:
        """All ranks with a plan at one instant; again, and later, where an order came too late."""
        active = [index for index, plans in zip(self._copying, self.plans, strict=True) if plans]
        while True:
            ran: list[Ran] = self._tell(active, start(monotonic_ns() + self._lead_ns))
            late = any(one.late for one in ran)
            self._adapt_lead(late=late)
            if not late:
                return _times(ran)
            if self._lead_ns > _MAX_LEAD_NS:
                raise ControlTimeout(
                    f"an order to start took more than {_MAX_LEAD_NS / 2e9:g} s to reach all "
                    f"{len(ran)} ranks; this host is too busy to measure"
                )

    def _adapt_lead(self, *, late: bool) -> None:
        """Twice as long after a round that came late, half as long after some that did not."""
        self._num_in_time = 0 if late else self._num_in_time + 1
        if late:
            self._lead_ns *= 2
        elif self._num_in_time % _CALM_ROUNDS == 0:
            self._lead_ns = max(self._lead_ns // 2, _LEAD_NS)

    def _judge(self, found: Sequence[Checked], what: str) -> None:
        for index, one in zip(self._destinations, found, strict=True):
            one.require_none_wrong(f"{self._names[index]}: {what}")

    def _tell(self, ranks: Sequence[int], message: msgspec.Struct) -> list[Any]:
        return self._call(dict.fromkeys(ranks, message))

    def _call(self, calls: dict[int, msgspec.Struct]) -> list[Any]:
        return self._team.call(calls, self._names)

    def _release(self) -> None:
        for ranks in (self._copying, self._others):  # who maps memory before whose it is
            self._team.release(ranks, self._names)


def _start(at_ns: int, tuning: Tuning) -> messages.Start:
    return messages.Start(at_ns=at_ns, engine=tuning.engine, num_sms=tuning.num_sms)


def _times(ran: Sequence[Ran]) -> RoundTimes:
    begin_ns, end_ns = min(one.begin_ns for one in ran), max(one.end_ns for one in ran)
    return RoundTimes(
        latency_us=(end_ns - begin_ns) / 1e3,
        post_us=max(one.posted_ns - one.begin_ns for one in ran) / 1e3,
        rank_us=tuple((one.end_ns - one.begin_ns) / 1e3 for one in ran),
        paths=tuple(sorted({path for one in ran for path in one.paths})),
        num_sms=max(one.num_sms for one in ran),
    )


def _ranges(
    copies: Sequence[LimitCopy], *, source: int | None = None, destination: int | None = None
) -> list[ByteRange]:
    """The ranges in the pool of one source or of one destination."""
    if source is not None:
        return [copy.source_range for copy in copies if copy.source == source]
    return [copy.destination_range for copy in copies if copy.destination == destination]
