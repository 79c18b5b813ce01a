"""A diagnosis from beginning to end: facts, measurements, checks."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from kvxfer import __version__
from kvxfer.diagnose.checks import run_checks
from kvxfer.diagnose.compare import changes_since
from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.inventory import facts_of, read_folder, read_live, write_folder
from kvxfer.diagnose.inventory.perftest_text import nic_figures
from kvxfer.diagnose.inventory.sources import Sources
from kvxfer.diagnose.limits import with_limits
from kvxfer.diagnose.measure.events import Task
from kvxfer.diagnose.measure.nic_runs import add_nics
from kvxfer.diagnose.measure.runner import run_measurements
from kvxfer.diagnose.result import SCHEMA, DiagnoseReport
from kvxfer.transport.host_copy import default_num_threads

_MIB = 1 << 20
_MAX_NUMA_NODES = 4


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        area_bytes: of each of a GPU's two areas of memory.
        host_bytes: of a copy on CPUs, or between host and GPU.
        num_queued, num_host_queued: copies of a round behind each other, as `Task` has them.
        rounds: timed for each figure.
        budget_s: after so many seconds nothing new is begun.
        nic_budget_s: likewise, of the NICs after that; 0 = they are left out.
    """

    area_bytes: int
    host_bytes: int
    num_queued: int
    num_host_queued: int
    rounds: int
    budget_s: float
    nic_budget_s: float


FULL = Effort(
    area_bytes=256 * _MIB,
    host_bytes=128 * _MIB,
    num_queued=8,
    num_host_queued=2,
    rounds=5,
    budget_s=40.0,
    nic_budget_s=15.0,
)
# Less memory and fewer rounds; a round is as long, or the same limits could not hold for it.
QUICK = Effort(
    area_bytes=64 * _MIB,
    host_bytes=32 * _MIB,
    num_queued=32,
    num_host_queued=8,
    rounds=2,
    budget_s=6.0,
    nic_budget_s=0.0,
)
# Beside a live workload: 32 MiB of a GPU's memory, and a millisecond of its links now and then.
GENTLE = Effort(
    area_bytes=16 * _MIB,
    host_bytes=16 * _MIB,
    num_queued=8,
    num_host_queued=1,
    rounds=2,
    budget_s=30.0,
    nic_budget_s=10.0,
)


def diagnose(
    *,
    effort: Effort = FULL,
    older: DiagnoseReport | None = None,
    expect_gpus: int | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> DiagnoseReport:
    """This machine.

    Args:
        effort: how much is measured.
        older: a report to compare with.
        expect_gpus: fewer are a finding.
        tell: is told what is done now.
    """
    start = time.monotonic()
    tell("reading the machine")
    facts = _facts(read_live(), expect_gpus)
    task = _task(facts, effort)
    figures = run_measurements(task, tell=tell)
    add_nics(figures, facts, task, budget_s=effort.nic_budget_s, tell=tell)
    return _judged(facts, figures, start, older)


def diagnose_folder(
    folder: Path, *, older: DiagnoseReport | None = None, expect_gpus: int | None = None
) -> DiagnoseReport:
    """A captured machine: facts alone, and rates of NICs where perftest's output is there.

    Raises:
        InvalidUsage: the folder holds no capture.
    """
    start = time.monotonic()
    sources = read_folder(folder)
    return _judged_sources(_facts(sources, expect_gpus), sources, start, older)


def capture(
    folder: Path, *, older: DiagnoseReport | None = None, expect_gpus: int | None = None
) -> DiagnoseReport:
    """Write this machine's capture, measure nothing, and judge what was read.

    Raises:
        InvalidUsage: the folder cannot be written, or holds something else than a capture.
    """
    start = time.monotonic()
    sources = read_live()
    write_folder(sources, folder)
    return _judged_sources(_facts(sources, expect_gpus), sources, start, older)


def _facts(sources: Sources, expect_gpus: int | None) -> Facts:
    facts = facts_of(sources)
    host = msgspec.structs.replace(facts.host, num_expected_gpus=expect_gpus)
    return msgspec.structs.replace(facts, host=host)


def _judged_sources(
    facts: Facts, sources: Sources, start: float, older: DiagnoseReport | None
) -> DiagnoseReport:
    reason = "a capture holds no measurements"
    skipped = dict.fromkeys(("pairs of GPUs", "crowds", "host and GPUs", "host", "NICs"), reason)
    figures = Figures(all=nic_figures(sources.texts), skipped=skipped)
    return _judged(facts, figures, start, older)


def _judged(
    facts: Facts, figures: Figures, start: float, older: DiagnoseReport | None
) -> DiagnoseReport:
    figures = with_limits(facts, figures)
    report = DiagnoseReport(
        schema=SCHEMA,
        environment={
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "kvxfer": __version__,
            "kernel": facts.host.kernel or "unknown",
            "driver": facts.host.driver or "none",
            "cpu": facts.host.cpu or "unknown",
        },
        facts=facts,
        figures=figures,
        checks=run_checks(facts, figures),
    )
    if older is not None:
        report.changes = changes_since(older, report)
    report.elapsed_s = time.monotonic() - start
    return report


def _task(facts: Facts, effort: Effort) -> Task:
    gpus = [gpu for gpu in facts.gpus or () if gpu.cuda_index is not None and not gpu.mig]
    return Task(
        devices={gpu.index: gpu.cuda_index for gpu in gpus if gpu.cuda_index is not None},
        pcis={gpu.index: gpu.pci for gpu in gpus},
        numa_cpus=_numa_cpus(facts),
        area_bytes=effort.area_bytes,
        host_bytes=effort.host_bytes,
        num_queued=effort.num_queued,
        num_host_queued=effort.num_host_queued,
        rounds=effort.rounds,
        budget_s=effort.budget_s,
        num_threads=default_num_threads(),
    )


def _numa_cpus(facts: Facts) -> dict[int, tuple[int, ...]]:
    """Nodes with CPUs that this process may use; all of its CPUs where no node is told."""
    nodes = {node.index: node.usable_cpus for node in facts.host.numa_nodes if node.usable_cpus}
    if not nodes:
        return {0: tuple(sorted(os.sched_getaffinity(0)))}
    return dict(sorted(nodes.items())[:_MAX_NUMA_NODES])
