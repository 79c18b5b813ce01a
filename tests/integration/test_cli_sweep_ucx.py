"""``kvxfer sweep --transport ucx``: two processes where this build has it, else a reason."""

import json
from pathlib import Path

import pytest

from kvxfer.cli.main import main
from kvxfer.transport import available_transports

TINY = ("--tokens", "16", "--iters", "2", "--warmup", "0", "--threads", "2")
_FOUND = available_transports()["ucx"]


@pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason)
@pytest.mark.parametrize("engine", ["auto", "direct", "staged"])
def test_ucx_is_swept(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "report.json"
    words = ["--transport", "ucx", *TINY, "--op", "put,get", "--engine", engine]
    assert main(["sweep", *words, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]
    assert [(row["transport"], row["op"], row["memory"]) for row in rows] == [
        ("ucx", "put", "private"),
        ("ucx", "get", "private"),
    ]
    assert all(row["verified"] and row["actual_path"].startswith("ucx ") for row in rows)


@pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason)
def test_an_engine_of_another_transport_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--transport", "ucx", "--engine", "streaming", *TINY]) == 2
    assert "over ucx; use auto, direct or staged" in capsys.readouterr().err


@pytest.mark.skipif(_FOUND.available, reason="ucx is here")
def test_without_ucx_the_reason_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--transport", "ucx", *TINY]) == 3
    assert "transport ucx: " in capsys.readouterr().err
