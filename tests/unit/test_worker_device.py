"""Where the cache of `kvxfer serve` and `send` lies: host memory, or which GPU's."""

import argparse
from types import SimpleNamespace

import pytest

from kvxfer import KVLayout
from kvxfer.cli import spawned, worker_side
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.memory import MemoryKind
from kvxfer.sweep import paths
from kvxfer.worker import WorkerOptions, options

LAYOUT = KVLayout(2, 2, head_dim=8, block_size=4)
HOST, DEVICE = MemoryKind.HOST, MemoryKind.DEVICE


@pytest.fixture
def num_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many GPUs are here, and every transport works."""
    count: int = request.param
    core = SimpleNamespace(device_count=lambda: count, no_device_reason=lambda: "none at all")
    for module in (options, paths, spawned):
        monkeypatch.setattr(module, "_core", core)
    monkeypatch.setattr(options, "create_transport", lambda name, *, memory: None)
    return count


def device_of(transport: str, memory: MemoryKind | None = None, device: int | None = None) -> int:
    return options.device_of(
        WorkerOptions(layout=LAYOUT, transport=transport, memory=memory, device=device)
    )


@pytest.mark.parametrize("num_gpus", [2], indirect=True)
@pytest.mark.usefixtures("num_gpus")
@pytest.mark.parametrize(
    ("transport", "memory", "device", "expected"),
    [
        ("nvlink", None, None, 0),
        ("nvlink", None, 1, 1),
        ("auto", None, None, 0),
        ("auto", HOST, None, -1),
        ("auto", HOST, 1, 1),  # over a network, which joins both kinds
        ("shm", None, None, -1),
        ("shm", DEVICE, None, -1),
        ("ucx", None, None, -1),
        ("nixl", None, None, -1),
        ("nixl", HOST, None, -1),
        ("nixl", DEVICE, None, 0),
        ("ucx", None, 1, 1),
        ("nixl", None, 0, 0),
    ],
)
def test_a_device_is_taken_where_it_is_named_or_follows(
    transport: str, memory: MemoryKind | None, device: int | None, expected: int
) -> None:
    assert device_of(transport, memory, device) == expected


@pytest.mark.parametrize("num_gpus", [2], indirect=True)
@pytest.mark.usefixtures("num_gpus")
def test_a_device_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="device 0 over shm, which moves host memory"):
        device_of("shm", device=0)
    with pytest.raises(InvalidUsage, match="device 2; this process sees 0 to 1"):
        device_of("nixl", device=2)


@pytest.mark.parametrize("num_gpus", [0], indirect=True)
@pytest.mark.usefixtures("num_gpus")
def test_without_a_gpu_a_named_device_is_an_error_and_host_memory_the_rest() -> None:
    for transport in ("auto", "ucx", "nixl"):
        with pytest.raises(NotAvailable, match="none at all"):
            device_of(transport, device=0)
        assert device_of(transport, DEVICE) == -1
    assert device_of("auto") == -1


@pytest.mark.parametrize("num_gpus", [2], indirect=True)
@pytest.mark.usefixtures("num_gpus")
def test_a_receiver_that_is_started_beside_takes_the_next_gpu() -> None:
    parser = argparse.ArgumentParser()
    worker_side.add_arguments(parser)
    args = parser.parse_args(["--transport", "nixl"])
    assert "--device" not in spawned.serve_words(args, "", 8, beside=-1)
    assert spawned.serve_words(args, "", 8, beside=0)[-2:] == ["--device", "1"]
    assert spawned.serve_words(args, "", 8, beside=1)[-2:] == ["--device", "0"]
