"""What a person sees while set-ups are started and measured."""

from functools import partial
from pathlib import Path

from kvxfer.cli.output import write
from kvxfer.cli.pd.status_line import StatusLine
from kvxfer.errors import KvxferError
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.launch.stack import Watcher
from kvxfer.pd.load.headline import headline
from kvxfer.pd.load.run import Watchers
from kvxfer.pd.result import PDPoint


def watchers(line: StatusLine) -> Watchers:
    """Progress on the status line, a line on standard output for each point."""

    def starting(spec: SetupSpec) -> Watcher:
        return partial(line.show_states, f"{spec.name}: starting")

    def began(spec: SetupSpec, point: PDPoint) -> None:
        line.show(f"{spec.name}: {point.stem}, {point.num_prompts} prompts")

    def measured(spec: SetupSpec, point: PDPoint, folder: Path) -> None:
        write(f"{spec.name} {point.stem}: {headline(point, folder)}\n")
        for finding in point.findings:
            line.say(f"  note: {finding}")

    def failed(spec: SetupSpec, error: KvxferError) -> None:
        line.say(f"{spec.name} FAILED: {error}")

    return Watchers(starting=starting, began=began, measured=measured, failed=failed)
