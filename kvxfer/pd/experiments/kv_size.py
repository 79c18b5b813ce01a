"""How large the KV of a request is, and how long it takes to move, by model and link.

Sizes follow from a model's public configuration. Times over a link are its bytes by the link's
rated speed, or come from sweeps (``--sweep``); several requests at once share a link evenly unless
their sharing was measured, so that the last of n takes n times as long.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer.errors import InvalidUsage
from kvxfer.layout.models import CATALOGUE, ModelShape
from kvxfer.pd.experiment_result import (
    Axis,
    Cell,
    Column,
    Curve,
    Curves,
    ExperimentResult,
    Figure,
    How,
    Said,
    Source,
    Table,
)
from kvxfer.pd.experiments.base import Experiment
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.options import SIZES, Options
from kvxfer.pd.planner import KVSize, TransferModel, load_transfer
from kvxfer.units import format_number, format_tokens

_GIB: Final = float(1 << 30)
_AT_ONCE: Final = (1, 2, 5, 10, 20, 50, 100)
_TOLD: Final = (1, 10, 100)
_DRAWN: Final = ("llama-3.1-8b", "llama-3.1-405b")
_ARTICLES_GIB: Final = {"llama-3.1-8b": 1.0, "llama-3.1-405b": 3.94}
"""What the articles' table says of 8k tokens, under the name of GB."""
_ARTICLES_TOKENS: Final = 8192
_SLOW_MS: Final = 100.0


@dataclass(frozen=True, slots=True)
class Link:
    """A way for KV to take: a rated speed, or measured transfers.

    Args:
        name: a label.
        gb_per_s: rated, for all requests at once together.
        measured: takes the place of the rated speed.
    """

    name: str
    gb_per_s: float = 0.0
    measured: TransferModel | None = None

    @property
    def how(self) -> How:
        """Where its times come from."""
        return "computed" if self.measured is None else "recorded"

    def time_s(self, kv: KVSize, num_tokens: int, num_requests: int) -> float:
        """Seconds until the last of so many requests that start together has moved."""
        num_bytes = kv.request_bytes(num_tokens)
        if self.measured is None:
            return num_requests * num_bytes / (self.gb_per_s * 1e9)
        alone_s = self.measured.curve(run_bytes=kv.run_bytes(1, 1)).alone_s(num_bytes)
        return alone_s / self.measured.share(num_requests)

    def reasons(self, kv: KVSize, num_tokens: int) -> Iterator[str]:
        """What was taken from outside the measurements."""
        if self.measured is not None:
            curve = self.measured.curve(run_bytes=kv.run_bytes(1, 1))
            yield from curve.reasons
            if not curve.covers(kv.request_bytes(num_tokens)):
                yield "outside the measured sizes: the nearest's rate above, its time below"


RATED: Final = (
    Link("100 Gbit/s", 12.5),
    Link("400 Gbit/s", 50.0),
    Link("8 x 400 Gbit/s", 400.0),
    Link("NVLink 4, 450 GB/s", 450.0),
)
_MAX_SWEEPS: Final = 2


def links_of(sweeps: Sequence[Path], rows: Mapping[str, str] | None = None) -> list[Link]:
    """The rated links, and one of each record of a sweep.

    Args:
        sweeps: the records.
        rows: of their rows, as `Options.sweep_rows`; of several records those that need it take it.

    Raises:
        InvalidUsage: there are too many records to draw, one cannot be read, or has rows of several
            transports, memories and so on, and none is named.
    """
    if len(sweeps) > _MAX_SWEEPS:
        raise InvalidUsage(f"{len(sweeps)} sweeps; give up to {_MAX_SWEEPS}, six lines are drawn")
    measured = []
    for path in sweeps:
        model = _transfers(path, rows or {}, is_alone=len(sweeps) == 1)
        measured.append(Link(f"{model.rows[0].transport}, {path.stem}", measured=model))
    return [*RATED, *measured]


def _transfers(path: Path, rows: Mapping[str, str], *, is_alone: bool) -> TransferModel:
    if not is_alone:
        with suppress(InvalidUsage):
            return load_transfer([path])
    return load_transfer([path], only=rows)


def _conduct(context: Context) -> ExperimentResult:
    links = links_of(context.options.sweeps, context.options.sweep_rows)
    lengths = context.options.load.isl
    longest = max(lengths)
    return ExperimentResult(
        name=EXPERIMENT.name,
        question=EXPERIMENT.question,
        scale=context.size,
        sources=[
            Source("sizes, from public configurations", "computed"),
            *(Source(f"times over {link.name}", link.how) for link in links),
        ],
        findings=[*_article_findings(), *_link_findings(links, longest)],
        tables=[_sizes(lengths), _times(links, longest)],
        figures=[_figure(links, longest)],
        notes=[
            "several requests at once share a link evenly; no sweep here measured their sharing",
            *_reasons(links, longest),
        ],
    )


def _article_findings() -> Iterator[Said]:
    for name, said_gib in _ARTICLES_GIB.items():
        found = KVSize.of(CATALOGUE[name]).request_bytes(_ARTICLES_TOKENS)
        verdict = "agrees" if round(found / _GIB, 2) == said_gib else "does not agree"
        yield Said(
            f"{name}, {_ARTICLES_TOKENS:,} tokens: {found / _GIB:.4g} GiB = {found / 1e9:.4g} GB; "
            f"the articles' {said_gib} {verdict}, in GiB",
            "computed",
        )


def _link_findings(links: Sequence[Link], num_tokens: int) -> Iterator[Said]:
    for name in _DRAWN:
        kv = KVSize.of(CATALOGUE[name])
        for link in links:
            alone, many = (link.time_s(kv, num_tokens, count) for count in (1, _TOLD[-1]))
            kept = _kept(int(_SLOW_MS * 1e-3 / alone))
            yield Said(
                f"{name}, {format_tokens(num_tokens)} tokens over {link.name}: "
                f"{format_number(alone * 1e3)} ms for one request, {format_number(many * 1e3)} ms "
                f"for the last of {_TOLD[-1]}; {kept} within {_SLOW_MS:g} ms",
                link.how,
            )


def _kept(count: int) -> str:
    if count == 0:
        return "not even one alone stays"
    return "one alone stays" if count == 1 else f"{count} at once stay"


def _sizes(lengths: Sequence[int]) -> Table:
    names = [format_tokens(length) for length in lengths]
    rows = [_size_row(shape, lengths) for shape in CATALOGUE.values()]
    return Table(
        title="KV of one request, bf16",
        how="computed",
        columns=[
            Column("model"),
            Column("layers"),
            Column("KV heads"),
            Column("head"),
            Column("a token", "KiB"),
            *(Column(f"{name} tokens", "GiB") for name in names),
            *(Column(f"{name} tokens", "GB") for name in names),
            Column(f"{names[-1]}, sliding layers keep their window", "GB"),
            Column(f"100 requests of {names[-1]}", "GB"),
        ],
        rows=rows,
    )


def _size_row(shape: ModelShape, lengths: Sequence[int]) -> list[Cell]:
    kv = KVSize.of(shape)
    sizes = [kv.request_bytes(length) for length in lengths]
    windowed = shape.windowed_request_bytes(shape.kv_layout(), lengths[-1])
    return [
        shape.name,
        float(shape.num_layers),
        float(shape.num_kv_heads),
        float(shape.head_dim),
        kv.bytes_per_token / 1024,
        *(size / _GIB for size in sizes),
        *(size / 1e9 for size in sizes),
        windowed / 1e9 if shape.sliding_layers else None,
        100 * sizes[-1] / 1e9,
    ]


def _times(links: Sequence[Link], num_tokens: int) -> Table:
    rows: list[list[Cell]] = []
    for name, shape in CATALOGUE.items():
        kv = KVSize.of(shape)
        for link in links:
            times = [link.time_s(kv, num_tokens, count) * 1e3 for count in _TOLD]
            rows.append([name, link.name, *times, link.how])
    return Table(
        title=f"Time until the last of n requests of {format_tokens(num_tokens)} tokens has moved",
        columns=[
            Column("model"),
            Column("link"),
            *(Column(f"n = {count}", "ms") for count in _TOLD),
            Column("how, alone"),
        ],
        rows=rows,
    )


def _figure(links: Sequence[Link], num_tokens: int) -> Figure:
    panels = [
        Curves(
            title=f"{name}, {format_tokens(num_tokens)} tokens",
            x=Axis("requests at once over one link", "log", [float(count) for count in _AT_ONCE]),
            y=Axis("until the last has moved, ms", "log"),
            series=[
                Curve(
                    link.name,
                    [float(count) for count in _AT_ONCE],
                    [
                        link.time_s(KVSize.of(CATALOGUE[name]), num_tokens, count) * 1e3
                        for count in _AT_ONCE
                    ],
                    link.how,
                )
                for link in links
            ],
        )
        for name in _DRAWN
    ]
    return Figure(
        name="transfer-time",
        caption="Time to move the KV of requests, by link",
        panels=list(panels),
        key=True,
    )


def _reasons(links: Sequence[Link], num_tokens: int) -> Iterator[str]:
    texts: dict[str, list[str]] = {}
    for link in links:
        for name, shape in CATALOGUE.items():
            for reason in link.reasons(KVSize.of(shape), num_tokens):
                texts.setdefault(f"{link.name}: {reason}", []).append(name)
    yield from (f"{text} ({', '.join(names)})" for text, names in texts.items())


EXPERIMENT: Final = Experiment(
    name="kv-size",
    question="How large is the KV of a request, and how long does it take to move, by model, link "
    "and requests at once?",
    sizes={size: Options() for size in SIZES},
    conduct=_conduct,
    measures=False,
)
