"""What a sweep takes of the host's memory, and that it gives it back."""

from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import NotAvailable
from kvxfer.layout import KVLayout
from kvxfer.sweep import messages
from kvxfer.sweep.agent import Agent
from kvxfer.sweep.host_memory import free_host_bytes, require_host_memory
from kvxfer.sweep.rig import Rig, RigSpec
from kvxfer.transport import Op

MIB = 1 << 20
GIB = 1 << 30
HEADROOM_BYTES = 512 * MIB
LAYOUT = KVLayout(1, 1, head_dim=1024, dtype="uint8", block_size=1024, kv="mla")
FREE = "kvxfer.sweep.host_memory.free_host_bytes"


def spec(num_blocks: int) -> RigSpec:
    return RigSpec(
        layout=LAYOUT,
        num_blocks=num_blocks,
        transport="loopback",
        memory="private",
        op=Op.PUT,
        num_threads=1,
        devices=(-1, -1),
    )


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    file = tmp_path / "meminfo"
    kib = 4 * GIB // 1024
    file.write_text(f"MemTotal: {2 * kib} kB\nMemAvailable:   {kib} kB\nHugePages_Total:  0\n")
    return file


def test_without_a_limit_what_the_host_has(meminfo: Path, tmp_path: Path) -> None:
    assert free_host_bytes(meminfo, tmp_path) == 4 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "stat", "free"),
    [
        ("max", "1", "", 4 * GIB),
        (3 * GIB, GIB, "", 2 * GIB),
        (3 * GIB, GIB, f"anon 5\ninactive_file {MIB}", 2 * GIB + MIB),
        (8 * GIB, GIB, "", 4 * GIB),
        (GIB, 2 * GIB, "", 0),
    ],
)
def test_the_limit_of_a_container(
    meminfo: Path, tmp_path: Path, limit: Any, used: Any, stat: str, free: int
) -> None:
    for name, value in (("max", limit), ("current", used), ("stat", stat)):
        (tmp_path / f"memory.{name}").write_text(f"{value}\n" if value else "")
    assert free_host_bytes(meminfo, tmp_path) == free


def test_some_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FREE, lambda: GIB)
    require_host_memory(GIB - HEADROOM_BYTES)
    with pytest.raises(NotAvailable, match=r"with 1 GiB of memory free, .* --total-bytes"):
        require_host_memory(GIB - HEADROOM_BYTES + 1)


def test_both_pools_must_fit_before_either_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = 4 * MIB
    agent = Agent()
    monkeypatch.setattr(FREE, lambda: HEADROOM_BYTES + 2 * pool)
    with Rig(spec(4), agent):
        pass
    monkeypatch.setattr(FREE, lambda: HEADROOM_BYTES + 2 * pool - 1)
    monkeypatch.setattr(agent, "call", lambda _: pytest.fail("the far side was asked"))
    with pytest.raises(NotAvailable, match="pools of 8 MiB"):
        Rig(spec(4), agent)
    agent.close()


class BrokenLoad:
    def __init__(self, *_: Any) -> None:
        pass

    def close(self) -> float:
        raise NotAvailable("the compute load failed")


def test_a_broken_load_keeps_neither_endpoint_nor_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    with Rig(spec(4), agent) as rig:
        monkeypatch.setattr("kvxfer.sweep.agent.ComputeLoad", BrokenLoad)
        rig.start_compute("gemm")
        closed = []
        for held in (agent._endpoint, agent._pool):
            monkeypatch.setattr(held, "close", closing(closed, held))
        with pytest.raises(NotAvailable, match="the compute load failed"):
            agent.call(messages.Release())
        assert closed == ["Endpoint", "PatternedCache"]
        agent.close()  # and nothing is left
        assert len(closed) == 2


def closing(closed: list[str], held: Any) -> Any:
    close = held.close

    def call() -> None:
        closed.append(type(held).__name__)
        close()

    return call
