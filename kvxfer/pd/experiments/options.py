"""What an experiment measures and works with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from kvxfer.pd.analysis import Objective, parse_objectives
from kvxfer.pd.launch.spec import SetupSpec, parse_setup
from kvxfer.pd.load.plan import LoadPlan

Size: TypeAlias = Literal["quick", "cpu", "gpu"]
"""``quick`` takes some minutes on a CPU, to see that all works; ``cpu`` shows the tiny model's
behaviour; ``gpu`` is for figures."""
SIZES: Final[tuple[Size, ...]] = ("quick", "cpu", "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Each size of an experiment has its own; a caller may replace any.

    Args:
        model: as ``--model``.
        setups: as ``--setup``, one a text.
        load: points that each set-up is measured at.
        hits: tokens at the beginning of a prompt whose KV is there already, for ``kv-reuse``.
        slo: as ``--slo``; empty: no objective.
        prefill_args, decode_args: what engines are told besides.
        engine: the planner's figures of an engine: a name that comes with kvxfer, or a file.
        sweeps: records of ``kvxfer sweep --json``, for transfers.
        sweep_rows: of the sweeps' rows, where they have several: values of the planner's `KINDS`,
            such as a transport.
    """

    model: str = "tiny"
    setups: tuple[str, ...] = ()
    load: LoadPlan = field(default_factory=LoadPlan)
    hits: tuple[int, ...] = ()
    slo: str = ""
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    engine: str = ""
    sweeps: tuple[Path, ...] = ()
    sweep_rows: Mapping[str, str] = field(default_factory=dict)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What makes a request good; empty where nothing is asked.

        Raises:
            InvalidUsage: ``slo`` cannot be read.
        """
        return parse_objectives(self.slo) if self.slo else ()

    def specs(self) -> list[SetupSpec]:
        """The set-ups.

        Raises:
            InvalidUsage: one cannot be read.
        """
        common = {"prefill_args": self.prefill_args, "decode_args": self.decode_args}
        return [parse_setup(text, common) for text in self.setups]
