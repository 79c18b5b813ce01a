"""Which points of load a run has, and what is run for each.

The load is that of the articles: random prompts of 1k and 8k tokens, 1k out, requests as fast as a
limit of concurrency lets them (closed loop), ten prompts for each request in flight. Loads like
those of users come at finite rates, evenly or in bursts, or are a trace that is replayed.
"""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvxfer.errors import InvalidUsage
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.load.replay import Replay
from kvxfer.pd.models import ServedModel
from kvxfer.pd.result import MAX_RATE, MIN_RATE, PDPoint

ISL: Final = (1024, 8192)
OSL: Final = (1024,)
CONCURRENCY: Final = (1, 2, 4, 8, 16, 32)
PROMPTS_PER_CONCURRENCY: Final = 10
DURATION_S: Final = 60.0
MAX_DURATION_S: Final = 86400
MAX_TOKENS: Final = 1 << 24
MAX_REQUESTS: Final = 1 << 20
_FEWEST_AT_A_RATE: Final = 10
_PERCENTILES: Final = "50,90,99,99.9"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Every point that each set-up is measured at.

    Args:
        isl, osl: tokens in and out.
        concurrency: requests in flight; at a finite rate the most of them, and so a limit that
            should not be reached.
        prompts_per_concurrency: a point without a rate has so many times its concurrency.
        request_rates: requests a second; ``inf``: as fast as the concurrency lets them.
        burstiness: shapes of the gamma distribution of times between arrivals, for finite rates:
            1 is a Poisson process, less is burstier.
        duration_s: a point at a finite rate sends for so long, and ten requests at least.
        replay: a trace whose requests take the place of ``isl``, ``osl`` and rates.
        extra_args: what the client is told besides.

    Raises:
        InvalidUsage: a value is out of range.
    """

    isl: tuple[int, ...] = ISL
    osl: tuple[int, ...] = OSL
    concurrency: tuple[int, ...] = CONCURRENCY
    prompts_per_concurrency: int = PROMPTS_PER_CONCURRENCY
    request_rates: tuple[float, ...] = (math.inf,)
    burstiness: tuple[float, ...] = (1.0,)
    duration_s: float = DURATION_S
    replay: Replay | None = None
    extra_args: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        limits = (
            ("isl", self.isl, MAX_TOKENS),
            ("osl", self.osl, MAX_TOKENS),
            ("concurrency", self.concurrency, MAX_REQUESTS),
            ("prompts_per_concurrency", (self.prompts_per_concurrency,), MAX_REQUESTS),
        )
        for name, values, most in limits:
            for value in values:
                if not 1 <= value <= most:
                    raise InvalidUsage(f"{name}: {value} is out of range; use 1 to {most}")
        for name, rates, besides in (
            ("request rate", self.request_rates, ", or inf"),
            ("burstiness", self.burstiness, ""),
        ):
            for rate in rates:
                if not (MIN_RATE <= rate <= MAX_RATE or (besides and rate == math.inf)):
                    raise InvalidUsage(f"{name} {rate}; use {MIN_RATE:g} to {MAX_RATE:g}{besides}")
        if not 0.0 < self.duration_s <= MAX_DURATION_S:
            raise InvalidUsage(
                f"duration {self.duration_s} s; use more than 0, to {MAX_DURATION_S}"
            )

    def points(self, spec: SetupSpec) -> list[PDPoint]:
        """The points of one set-up, short prompts and light loads first."""
        if self.replay is not None:
            return [self.replay.point(concurrency) for concurrency in self.concurrency]
        osl = (1,) if spec.kind == "prefill_only" else self.osl
        return [
            self._point(num_in, num_out, concurrency, rate, shape)
            for num_in in self.isl
            for num_out in osl
            for shape in self.burstiness
            for rate in self.request_rates
            for concurrency in self.concurrency
            if rate < math.inf or shape == self.burstiness[0]  # without a rate there is no burst
        ]

    def _point(
        self, isl: int, osl: int, concurrency: int, rate: float, burstiness: float
    ) -> PDPoint:
        if rate == math.inf:
            num_prompts = concurrency * self.prompts_per_concurrency
            return PDPoint(concurrency=concurrency, num_prompts=num_prompts, isl=isl, osl=osl)
        num_prompts = max(_FEWEST_AT_A_RATE, round(rate * self.duration_s))
        if num_prompts > MAX_REQUESTS:
            raise InvalidUsage(
                f"{rate:g} requests/s for {self.duration_s:g} s are {num_prompts}; a point has up "
                f"to {MAX_REQUESTS}: make it shorter"
            )
        return PDPoint(
            concurrency=concurrency,
            num_prompts=num_prompts,
            isl=isl,
            osl=osl,
            request_rate=rate,
            burstiness=burstiness,
        )

    def words(
        self, point: PDPoint, site: PythonSite, model: ServedModel, url: str, served_name: str
    ) -> list[str]:
        """The client's command line, but for where it writes."""
        options = {
            "--backend": "openai",
            "--base-url": url,
            "--endpoint": "/v1/completions",
            "--model": served_name,
            "--tokenizer": model.source,
            **(_random(point) if self.replay is None else self.replay.options()),
            "--num-prompts": str(point.num_prompts),
            "--max-concurrency": str(point.concurrency),
            "--temperature": "0",
            "--seed": str(seed_of(point)),
            # Both would send the first prompt before the clock runs, and the prefix cache then
            # answers it; see warmup.py.
            "--ready-check-timeout-sec": "0",
            "--num-warmups": "0",
            "--percentile-metrics": "ttft,tpot,itl,e2el",
            "--metric-percentiles": _PERCENTILES,
        }
        words = [word for pair in options.items() for word in pair]
        program = [site.python, "-m", "kvxfer.pd.load.vllm_bench"]
        return [*program, *words, "--ignore-eos", "--disable-tqdm", *self.extra_args]


def _random(point: PDPoint) -> dict[str, str]:
    """Prompts of one size, and how they arrive."""
    options = {
        "--dataset-name": "random",
        "--random-input-len": str(point.isl),
        "--random-output-len": str(point.osl),
        "--request-rate": "inf" if point.request_rate is None else f"{point.request_rate:g}",
    }
    if point.request_rate is not None:
        options["--burstiness"] = f"{point.burstiness:g}"
    return options


def seed_of(point: PDPoint) -> int:
    """Of a point's prompts: equal for every set-up, different for every point.

    With one seed for all, a point of two requests begins with the prompts of the point before,
    which the prefix cache holds.
    """
    return zlib.crc32(point.stem.encode()) & 0x7FFFFFFF


def parse_tokens(name: str, texts: Iterable[str]) -> tuple[int, ...]:
    """Numbers of tokens, such as ``1k`` (1,024) or ``300``.

    Raises:
        InvalidUsage: one is no such number.
    """
    values = []
    for text in texts:
        digits = text.lower().removesuffix("k")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
            raise InvalidUsage(f"{name}: {text!r} is no number of tokens; write 300 or 8k")
        values.append(int(digits) * (1024 if text.lower().endswith("k") else 1))
    return tuple(values)
