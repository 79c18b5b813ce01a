"""Handing a request from its prefill engine to a decode engine: reserve there, transfer, release.

The decode engine takes the memory first, at the end of a step, as its scheduler would; then the KV
moves, over the port of either engine, and is shared out with others on the way; then the prefill
engine's memory is free again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.pd.planner.kv_size import KVSize
from kvxfer.pd.planner.setup import Setup
from kvxfer.pd.planner.simulation.clock import Clock
from kvxfer.pd.planner.simulation.engine import Engine
from kvxfer.pd.planner.simulation.job import Job
from kvxfer.pd.planner.simulation.links import Links
from kvxfer.pd.planner.transfer_model import Curve, TransferModel


@dataclass(frozen=True, slots=True)
class Handover:
    """A request's KV on its prefill engine, waiting to be moved."""

    source: Engine
    held_tokens: int
    num_bytes: int
    work_s: float  # of the transfer alone, what is left of it when the prefill ends


class Transfers:
    """All transfers of a PD set-up.

    Args:
        clock: the simulation's.
        setup: engines, how they send, and how many share a link.
        kv: bytes of a request.
        model: measured transfers; None: they take no time.
    """

    def __init__(self, clock: Clock, setup: Setup, kv: KVSize, model: TransferModel | None) -> None:
        """Nothing is on its way."""
        self._clock = clock
        self._setup = setup
        self._kv = kv
        self._model = model
        self._curves: dict[int, Curve] = {}
        self._num_moved = 0
        self._outside: list[tuple[Curve, float]] = []  # bytes that a curve does not cover
        self._links = Links(clock, model.share if model else lambda count: 1.0)

    def prepare(self, job: Job, source: Engine, source_tp: int, last_chunk_tokens: int) -> Handover:
        """What is left to do for a job whose prefill has just ended.

        Sent as a whole, all of it; sent meanwhile, its last part, or what the link did not manage
        while the prompt was computed. That the early parts share links with others is left out.
        """
        num_bytes = self._kv.request_bytes(job.request.num_prompt_tokens)
        work_s = 0.0
        if self._model is not None:
            curve = self._curve(source_tp)
            work_s = self._alone_s(curve, num_bytes)
            if self._setup.send != "whole":
                hidden_s = self._clock.now_s - job.started_s
                last_s = self._last_part_s(curve, last_chunk_tokens)
                work_s = min(work_s, max(last_s, work_s - hidden_s))
        return Handover(source, job.held, num_bytes, work_s)

    def _last_part_s(self, curve: Curve, last_chunk_tokens: int) -> float:
        parts = self._kv.num_layers if self._setup.send == "layers" else 1
        num_bytes = last_chunk_tokens * self._kv.bytes_per_token / parts
        if num_bytes < curve.sizes_bytes[0]:  # it takes no longer than the smallest, as is assumed
            return curve.alone_s(num_bytes)
        return self._alone_s(curve, num_bytes)

    def _alone_s(self, curve: Curve, num_bytes: float) -> float:
        """Seconds of one transfer alone, noted where no such size was measured."""
        self._num_moved += 1
        if not curve.covers(num_bytes):
            self._outside.append((curve, num_bytes))
        return curve.alone_s(num_bytes)

    def start(self, job: Job, target: Engine, done: Callable[[], None]) -> None:
        """Move a job's KV; ``done`` is called when it is there and the hand-over is through."""
        handover = job.handover
        assert handover is not None
        job.handover = None
        shared = self._setup.engines_per_link
        ends = (
            ("out", handover.source.index // shared),
            ("in", (target.index - self._setup.num_prefill) // shared),
        )

        def arrived() -> None:
            handover.source.release(handover.held_tokens)
            done()

        control_s = self._model.control_s if self._model else 0.0
        begins_s = self._clock.now_s + control_s
        self._clock.at(begins_s, self._links.start, handover.work_s, ends, arrived)

    def findings(self) -> list[str]:
        """What was taken from outside the measurements."""
        if self._model is None:
            return ["transfers take no time: no sweep was given"]
        found = [reason for curve in self._curves.values() for reason in curve.reasons]
        if self._outside:
            curve, sizes = self._outside[0][0], [size for _, size in self._outside]
            low, high = curve.sizes_bytes[0] / 1e9, curve.sizes_bytes[-1] / 1e9
            what = "transfers" if self._setup.send == "whole" else "transfers and last parts"
            found.append(
                f"{len(sizes)} of {self._num_moved} {what} ({min(sizes) / 1e9:.3g} to "
                f"{max(sizes) / 1e9:.3g} GB) lie outside the {low:.3g} to {high:.3g} GB measured"
            )
        most = self._links.most_at_once
        if not self._model.covers(most):
            found.append(f"up to {most} transfers shared a link; so many at once were not measured")
        return found

    def _curve(self, source_tp: int) -> Curve:
        if source_tp not in self._curves:
            assert self._model is not None
            target_tp = self._setup.decode_tp
            self._curves[source_tp] = self._model.curve(
                run_bytes=self._kv.run_bytes(source_tp, target_tp),
                src_tp=source_tp,
                dst_tp=target_tp,
            )
        return self._curves[source_tp]
