"""Which points of load a run has, and what is run for each.

The load is that of the articles: random prompts of 1k and 8k tokens, 1k out, requests as fast as a
limit of concurrency lets them (closed loop), ten prompts for each request in flight.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvxfer.errors import InvalidUsage
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.models import ServedModel
from kvxfer.pd.result import PDPoint

ISL: Final = (1024, 8192)
OSL: Final = (1024,)
CONCURRENCY: Final = (1, 2, 4, 8, 16, 32)
PROMPTS_PER_CONCURRENCY: Final = 10
MAX_TOKENS: Final = 1 << 24
MAX_REQUESTS: Final = 1 << 20
_PERCENTILES: Final = "50,90,99,99.9"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Every point that each set-up is measured at.

    Args:
        isl, osl: tokens in and out.
        concurrency: requests in flight.
        prompts_per_concurrency: a point has so many times its concurrency.
        request_rate: requests a second, or ``inf``.
        extra_args: what the client is told besides.

    Raises:
        InvalidUsage: a value is out of range.
    """

    isl: tuple[int, ...] = ISL
    osl: tuple[int, ...] = OSL
    concurrency: tuple[int, ...] = CONCURRENCY
    prompts_per_concurrency: int = PROMPTS_PER_CONCURRENCY
    request_rate: float = float("inf")
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
        if not self.request_rate > 0:
            raise InvalidUsage(f"request rate {self.request_rate}; use more than 0, or inf")

    def points(self, spec: SetupSpec) -> list[PDPoint]:
        """The points of one set-up, short prompts and few requests first."""
        osl = (1,) if spec.kind == "prefill_only" else self.osl
        return [
            PDPoint(
                concurrency=concurrency,
                num_prompts=concurrency * self.prompts_per_concurrency,
                isl=num_in,
                osl=num_out,
            )
            for num_in in self.isl
            for num_out in osl
            for concurrency in self.concurrency
        ]

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
            "--dataset-name": "random",
            "--random-input-len": str(point.isl),
            "--random-output-len": str(point.osl),
            "--num-prompts": str(point.num_prompts),
            "--max-concurrency": str(point.concurrency),
            "--request-rate": f"{self.request_rate:g}",
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
