"""A plan as people read it: the two sides, the picture, every pair, every source rank."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvxfer.report.plan_picture import picture
from kvxfer.report.plan_result import PairPlan, PlanReport, said
from kvxfer.report.sweep_table import format_us
from kvxfer.units import format_bytes

_MAX_PAIRS = 96
_BAR_COLUMNS = 16
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_WIDEST = 10_000  # columns; wider than any table here


def print_plan(report: PlanReport, console: Console) -> None:
    """Write the whole report; where a table needs more width than there is, it takes it."""
    for line in [*_head(report), Text(), *picture(report, console.width)]:
        console.print(line, soft_wrap=True)
    tables = [_pair_table(report), _source_table(report)]
    if len(report.pairs) > _MAX_PAIRS:
        del tables[0]
    for table in tables:
        needed = Measurement.get(console, console.options.update(width=_WIDEST), table)
        console.width = max(console.width, needed.maximum)
        console.print(table)
    for text in _remarks(report):
        console.print(f"  {text}", soft_wrap=True, highlight=False, markup=False)


def _head(report: PlanReport) -> Iterator[Text]:
    count = report.num_kv_heads
    heads = "latents (MLA)" if report.latent else f"{count} KV head{'s' if count > 1 else ''}"
    yield Text.assemble(
        ("  " + report.model, "bold"),
        f": {report.num_layers} layers, {heads}, tokens {said(report.tokens)}",
    )
    yield Text(f"  src  {report.src.spec}")
    yield Text(f"  dst  {report.dst.spec}")
    if report.num_sliding:
        yield Text(
            f"  {report.num_sliding} of {report.num_layers} layers slide: "
            f"they move the last {report.window} tokens alone"
        )
    if report.converts:
        yield Text("  elements become fp8 on the way: half the bytes that are read are written")


def _pair_table(report: PlanReport) -> Table:
    names = ("from", "to", "layers", "heads", "bytes", "runs", "a run", "pages", "boxes")
    table = _table(names, left=("from", "to"))
    for pair in report.pairs:
        table.add_row(
            report.src.name(pair.src),
            report.dst.name(pair.dst),
            "\n".join(said(part.layers) for part in pair.parts),
            "\n".join("latent" if report.latent else said(part.heads) for part in pair.parts),
            format_bytes(pair.num_bytes),
            f"{pair.num_runs:,}",
            _run(pair, converts=report.converts),
            f"{pair.num_pages:,}",
            str(pair.num_boxes),
        )
    return table


def _run(pair: PairPlan, *, converts: bool) -> str:
    """The size of a run as it is read; where runs become shorter on the way, also as written."""
    shortest, longest = pair.run_bytes[0], pair.run_bytes[-1]
    if converts:
        return f"{format_bytes(longest)} → {format_bytes(longest // 2)}"
    if shortest != longest:
        return f"{format_bytes(shortest)} – {format_bytes(longest)}"
    return format_bytes(longest)


def _source_table(report: PlanReport) -> Table:
    table = _table(
        ("source", "sends", "", "of mean", "tables", "plan", "routes"),
        left=("source", ""),
    )
    sent, tables = report.sent_bytes(), report.table_bytes()
    for rank, num_bytes in enumerate(sent):
        table.add_row(
            report.src.name(rank),
            format_bytes(num_bytes),
            _bar(num_bytes / max(sent)),
            f"{num_bytes * len(sent) / report.total_bytes:.0%}",
            format_bytes(tables[rank]),
            format_us(report.plan_us[rank]),
            format_us(report.route_us[rank]),
        )
    return table


def _table(names: Sequence[str], *, left: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def _bar(fraction: float) -> str:
    eighths = round(fraction * _BAR_COLUMNS * 8)
    return (_EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8]).strip()


def _remarks(report: PlanReport) -> Iterator[str]:
    received, count = report.received_bytes(), len(report.pairs)
    least, most = (format_bytes(of(received)) for of in (min, max))
    yield (
        f"{format_bytes(report.total_bytes)} in {count} pair{'s' if count > 1 else ''} of ranks; "
        f"a destination receives {least}{f' to {most}' if least != most else ''}"
    )
    yield "plan: to match block tables and plan one request; routes: once for all of them"
    if count > _MAX_PAIRS:
        yield f"{count} pairs are too many for a table here; --json FILE has them"
