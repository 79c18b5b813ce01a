"""Standard output that cannot be written, or is not there."""

import os
import subprocess
import sys

import pytest

from kvxfer.cli.main import main

COMMANDS = [
    ["plan"],
    ["plan", "--json", "-"],
    ["model", "llama-3.1-8b"],
    ["model", "llama-3.1-8b", "--json", "-"],
]
DEADLINE_S = 60.0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_said_in_one_line(command: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvxfer", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            cwd="/",
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    text = f"kvxfer {command[0]}: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, text)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_closed_output_is_no_error(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(command) == 0
