"""Sub-commands, each a module of a package; only the one that is asked for is imported."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def add_commands(
    parser: argparse.ArgumentParser, package: str, names: Sequence[str], runs: str
) -> None:
    """Give a parser a sub-command for each module ``names`` of ``package``.

    A module has ``add_arguments(parser)`` and ``run(args)``, and its first line says ``NAME:
    SUMMARY.``. The parsed arguments hold its ``run`` as ``runs``, and its parser as ``parser``.
    """
    commands = parser.add_subparsers(
        dest=f"{runs}_command", required=True, metavar="COMMAND", parser_class=_Command
    )
    for name in names:
        module = f"{package}.{name}"
        summary = _summary(module)
        commands.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=parser.formatter_class,
            module=module,
            runs=runs,
        )


class _Command(argparse.ArgumentParser):
    """Gets its options when it is used: importing all commands takes half a second."""

    def __init__(self, *args: Any, module: str, runs: str, **more: Any) -> None:
        super().__init__(*args, **more)
        self._module, self._runs = module, runs

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._module:
            module, self._module = import_module(self._module), ""
            self.set_defaults(**{self._runs: module.run, "parser": self})
            module.add_arguments(self)
        return super().parse_known_args(args, namespace)


def _summary(module: str) -> str:
    """The first line of a module's docstring, which is not imported for it."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    with Path(spec.origin).open(encoding="utf-8") as file:
        return file.readline().strip().strip('"').split(": ", 1)[-1]
