"""`kvxfer send` and the `kvxfer serve` that it starts, with caches in a GPU's memory."""

import subprocess
import sys

import pytest
from transport_pairs import NIXL, UCX, Kind, require_available

DEADLINE_S = 120.0


def send(*arguments: str) -> str:
    command = [sys.executable, "-m", "kvxfer", "send", "--tokens", "50", "--requests", "3"]
    done = subprocess.run(
        [*command, "--model", "qwen2.5-7b", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("every byte checked by the receiver\n")
    return done.stdout


@pytest.mark.parametrize(("kind", "slots"), [(UCX, "pinned host slots"), (NIXL, "slots")])
def test_a_network_moves_the_memory_of_gpus(kind: Kind, slots: str) -> None:
    require_available(kind)
    assert slots in send("--transport", kind.transport, "--device", "0")


@pytest.mark.parametrize("kind", [UCX, NIXL])
def test_a_network_moves_host_memory_where_no_gpu_is_named(kind: Kind) -> None:
    require_available(kind)
    assert "slots" not in send("--transport", kind.transport)
