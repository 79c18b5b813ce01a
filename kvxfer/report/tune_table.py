"""A tuning profile as tables: what it chooses, and what that gained."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kvxfer.report.sweep_table import format_us
from kvxfer.tuning import Check, Profile, Rule, Section
from kvxfer.units import format_bytes

_TITLE = "default and profile in turns, the median repeat, every byte checked on the receiver"


def print_profile(profile: Profile, console: Console) -> None:
    """Write the choices, the validation, and a line that sums it up."""
    console.print(_choices(profile))
    if profile.checks:
        console.print(_validation(profile.checks))
    console.print(summary(profile))


def _choices(profile: Profile) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"tuning profile of {profile.created}")
    for name in ("for", "copies", "choice"):
        table.add_column(name)
    for section in profile.sections:
        where = f"{section.transport}, {section.memory} memory"
        for what, choice in _section_choices(section):
            table.add_row(where, what, choice)
    for kind, names in profile.order.items():
        table.add_row("auto", f"{kind} memory, within this host", " before ".join(names))
    if profile.is_empty:
        table.add_row("all", "all", "the defaults")
    return table


def _section_choices(section: Section) -> list[tuple[str, str]]:
    rows = []
    if section.num_threads is not None:
        rows.append(("all", f"{section.num_threads} threads"))
    rows += [
        ("all", f"{one.num_slots} slots of {format_bytes(one.slot_bytes)}, {one.place} memory")
        for one in section.slots
    ]
    rows += [(_sizes(rule), _way(rule)) for rule in section.rules]
    return rows


def _sizes(rule: Rule) -> str:
    runs = f"{format_bytes(rule.min_run_bytes)} to {format_bytes(rule.max_run_bytes)}"
    totals = f"{format_bytes(rule.min_total_bytes)} to {format_bytes(rule.max_total_bytes)}"
    return f"{rule.op}, runs {runs}, in all {totals}"


def _way(rule: Rule) -> str:
    words = [rule.engine] if rule.engine != "auto" else []
    if rule.num_sms:
        words.append(f"{rule.num_sms} SMs")
    return ", ".join(words)


def _validation(checks: Sequence[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=_TITLE)
    for name in ("transport", "tp"):
        table.add_column(name)
    for name in ("run", "in all", "default", "profile", "gain", "noise"):
        table.add_column(name, justify="right")
    table.add_column("")
    for check in checks:
        table.add_row(
            f"{check.transport} {check.op}, {check.memory}",
            f"{check.src_tp}:{check.dst_tp}",
            format_bytes(check.run_bytes),
            format_bytes(check.total_bytes),
            format_us(check.default_us),
            format_us(check.profile_us),
            f"{check.gain:+.0%}",
            f"{check.noise:.0%}",
            _word(check),
        )
    return table


def _word(check: Check) -> str:
    """The verdict, and why where the figures beside it look like another."""
    if check.verdict == "same" and abs(check.gain) > check.noise:
        return "same: not in every repeat"
    return check.verdict


def summary(profile: Profile) -> str:
    """In a sentence or two, also where nothing was gained."""
    counts = {word: 0 for word in ("gain", "same", "slower", "taken back")}
    for check in profile.checks:
        counts[check.verdict] += 1
    text = (
        f"{len(profile.checks)} points: {counts['gain']} faster than noise, {counts['same']} "
        f"within it, {counts['slower']} slower, {counts['taken back']} taken back."
    )
    if profile.is_empty:
        text += " The defaults are as good as anything that was tried here."
    if counts["slower"]:
        text += " What is slower has the default's settings: it shows how far noise goes."
    return text
