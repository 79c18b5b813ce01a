"""Sweep rows that a machine of known speeds would give, without one."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvxfer.sweep.result import Latency, Median, Rate, SweepResult
from kvxfer.sweep.tune.plan import Area, Sizes
from kvxfer.sweep.tune.trials import AGAIN, DEFAULT, Point, Trials
from kvxfer.tuning import Profile, Section

Speed = Callable[[Section, Point], float]
"""Microseconds of a request at a point, as a section has it run."""


def row_of(point: Point, latency_us: float) -> SweepResult:
    """A row of a sweep."""
    rate = point.total_bytes / latency_us / 1e3
    is_pair = point.src_tp == point.dst_tp == 1
    total_bytes = point.total_bytes * max(point.src_tp, point.dst_tp)
    return SweepResult(
        transport="shm",
        model="raw",
        num_tokens=16,
        block_size=16,
        page_bytes=point.run_bytes if is_pair else 2 * point.run_bytes,
        num_pages=total_bytes // point.run_bytes,
        total_bytes=total_bytes,
        src_tp=point.src_tp,
        dst_tp=point.dst_tp,
        order="nhd",
        block_order="shuffled",
        sm_count=0,
        num_threads=1,
        iters=1,
        gb_per_s=Rate(rate, rate, rate),
        latency_us=Latency(latency_us, latency_us, latency_us),
        limit_gb_per_s=rate,
        fraction_of_limit=1.0,
        plan_us=Median(1.0),
        post_us=Median(1.0),
        verified=True,
        actual_path="synthetic",
        notes=[],
        op=point.op,
        memory="shared",
        dtype="uint8",
        run_bytes=None if is_pair else point.run_bytes,
    )


def trials_of(
    candidates: Mapping[str, Callable[[Point], float]],
    points: Sequence[Point],
    *,
    num_repeats: int = 5,
    noise: float = 0.0,
    seed: int = 0,
) -> Trials:
    """Trials of functions from points to microseconds; where ``default`` is one, it runs twice."""
    trials, rng = Trials(), np.random.default_rng(seed)
    names = (*candidates, AGAIN) if DEFAULT in candidates else tuple(candidates)
    for _ in range(num_repeats):
        drift = rng.uniform(1.0, 3.0)  # of the whole machine, which all of a repeat share
        for point in points:
            for name in names:
                time_us = candidates[DEFAULT if name == AGAIN else name](point)
                time_us *= drift * rng.lognormal(0.0, noise)
                trials.add(name, row_of(point, time_us))
    return trials


class SyntheticRotation:
    """Stands for `Rotation`: a machine whose speeds are given."""

    def __init__(self, speed: Speed, points: Sequence[Point], noise: float = 0.0) -> None:
        self._speed, self._points, self._noise = speed, points, noise
        self._seed = 0

    def __call__(self, area: Area, sizes: Sizes, *, with_ranks: bool) -> "SyntheticRotation":
        self._area = area
        return self

    def __enter__(self) -> "SyntheticRotation":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def reasons(self) -> list[str]:
        return [] if self._points else ["nothing reaches it"]

    def num_measurements(self, num_profiles: int) -> int:
        return num_profiles

    def measure(self, profiles: Mapping[str, Profile], on_measured: Callable[[], None]) -> Trials:
        self._seed += 1
        speeds = {}
        for name, profile in profiles.items():
            section = profile.section(*self._area)
            speeds[name] = lambda point, section=section: self._speed(section, point)
            on_measured()
        speeds.pop(AGAIN)
        return trials_of(speeds, self._points, noise=self._noise, seed=self._seed)
