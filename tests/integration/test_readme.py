"""What the README shows, run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TIMEOUT_S = 100.0
COMMANDS = ("sweep", "ranks", "workers", "tune", "diagnose", "model", "plan", "pd-plan")


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(name: str) -> list[str]:
    marked = README.read_text(encoding="utf-8").split(f"<!-- ci: {name} -->\n", 1)[1]
    return blocks("bash", marked)[0].replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("program", blocks("python", README.read_text(encoding="utf-8")))
def test_a_program_runs(program: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=TIMEOUT_S)


def test_a_program_that_fails_is_seen(tmp_path: Path) -> None:
    program = blocks("python", README.read_text(encoding="utf-8"))[1]
    broken = program.replace("prefill.incarnation, 1,", "prefill.incarnation, 2,")
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(
            [sys.executable, "-c", broken],
            check=True,
            cwd=tmp_path,
            timeout=TIMEOUT_S,
            stderr=subprocess.DEVNULL,
        )


@pytest.mark.parametrize(
    "line",
    [line for name in COMMANDS for line in commands(name)],
)
def test_a_command_runs(line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)
    assert words[0] == ".venv/bin/kvxfer"
    (tmp_path / "bench").symlink_to(ROOT / "bench")  # commands name records by the clone's folders
    program = [sys.executable, "-m", "kvxfer.cli.main", *words[1:]]
    subprocess.run(program, check=True, cwd=tmp_path, timeout=TIMEOUT_S, stdout=subprocess.PIPE)
