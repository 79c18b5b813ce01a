"""The pytest plug-in, as a user's own suite sees it: in a pytest of its own."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from imports import modules_after
from waiting import eventually

from kvxfer.errors import InvalidUsage, NotAvailable, PeerLost, VerificationError
from kvxfer.layout import KVLayout
from kvxfer.sweep.pair import Pair, PairFactory, PeerProcesses
from kvxfer.sweep.pair_benchmark import _Rounds
from kvxfer.transport import available_transports

pytest_plugins = "pytester"

DEADLINE_S = 60.0
HEAVY = ("torch", "cupy", "numpy", "zmq", "msgspec", "rich", "pynvml", "kvxfer._core")
LAYOUT = KVLayout(2, 1, head_dim=16, block_size=4)
HEADER = """
import numpy as np
import pytest
from kvxfer import KVLayout
from kvxfer.errors import VerificationError
LAYOUT = KVLayout(2, 1, head_dim=16, block_size=4)
SRC, DST = [5, 1, 2], np.array([0, 7, 6])
"""
BENCHMARK = (
    HEADER
    + """
def test_transfer(kvxfer_pair, kvxfer_benchmark):
    pair = kvxfer_pair(layout=LAYOUT, num_blocks=8)
    kvxfer_benchmark(pair, SRC, DST, rounds=3, warmup_rounds=1)
"""
)
# The copies of that benchmark: one to prove, one to warm up, three timed; disabled, two.
PROOF, WARMUP, MIDDLE, LAST, LAST_DISABLED = 0, 1, 3, 4, 1
PLANT = """
import kvxfer.sweep.pair as pair
from kvxfer.transport.base import FinishedTransfer
healthy, calls = pair.Pair.move, []
def move(self, plan, **options):
    calls.append(None)
    if len(calls) - 1 != {faulty}:
        return healthy(self, plan, **options)
    return FinishedTransfer(plan.total_bytes, "nowhere")
pair.Pair.move = move
"""
SUMMARY = "every byte checked by the receiver"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a user's test file, with a conftest perhaps, in a pytest of its own."""
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    for name in [one for one in os.environ if one.startswith("PYTEST_XDIST_")]:
        monkeypatch.delenv(name)  # it is not of the processes that run these tests
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(text: str, *options: str, conftest: str = "") -> pytest.RunResult:
        pytester.makepyfile(test_user=text)
        if conftest:
            pytester.makeconftest(conftest)
        arguments = ("-p", "no:cacheprovider", "-rA", *options)
        return pytester.runpytest_subprocess(*arguments, timeout=DEADLINE_S)

    return run


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def benchmarks_of(path: Path) -> list[dict[str, Any]]:
    """What --benchmark-json holds; without a figure there is no file, or an empty one."""
    text = path.read_text() if path.exists() else ""
    found: list[dict[str, Any]] = json.loads(text)["benchmarks"] if text else []
    return found


# What it costs those who do not use it.


def new_modules(code: str) -> set[str]:
    """Modules that ``code`` loads on top of pytest."""
    return modules_after(code, Path("/"), on_top_of="pytest")


def test_it_imports_nothing() -> None:
    assert new_modules("import kvxfer.pytest_plugin") == {"kvxfer", "kvxfer.pytest_plugin"}
    assert {"numpy", "kvxfer._core"} <= new_modules("import kvxfer.sweep")  # it would be seen


def test_it_is_loaded_and_imports_nothing_where_nobody_uses_it(suite: Callable[..., Any]) -> None:
    code = f"""
    import sys
    def test_light(request):
        assert request.config.pluginmanager.hasplugin("kvxfer")
        assert not [name for name in {HEAVY} if name in sys.modules]
    """
    suite(code).assert_outcomes(passed=1)


# Pairs.


def test_a_suite_gets_pairs(suite: Callable[..., Any]) -> None:
    code = """
    import os
    from pathlib import Path

    def children():
        pid = os.getpid()
        return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())

    @pytest.mark.parametrize("op", ["put", "get"])
    @pytest.mark.parametrize("memory", ["shared", "private"])
    def test_pair(kvxfer_pair, memory, op):
        pair = kvxfer_pair(layout=LAYOUT, num_blocks=8, memory=memory, op=op, num_threads=2)
        pair.fill_destination(1)
        pair.fill(2)
        transfer = getattr(pair, op)(SRC, DST)
        assert transfer.num_bytes == pair.total_bytes(SRC) == 3 * LAYOUT.block_bytes
        assert ("shared" if memory == "shared" else "process_vm") in transfer.actual_path
        pair.check(2, SRC, DST)
        pair.check_untouched(1, DST)
        with pytest.raises(VerificationError, match="the request"):
            pair.check(2, SRC, DST[::-1])
        with pytest.raises(VerificationError, match="outside the request"):
            pair.check_untouched(1, DST[:2])
        assert pair.limit_copy(100) > 0
        print("child", *children())

    def test_two_at_once(kvxfer_pair):
        pairs = [kvxfer_pair(layout=LAYOUT, num_blocks=8, transport="shm") for _ in range(2)]
        for seed, pair in enumerate(pairs):
            pair.fill(seed)
            pair.put(SRC, DST)
        for seed, pair in enumerate(pairs):
            pair.check(seed, SRC, DST)
        print("child", *children())
    """
    code = HEADER + "\n".join(line[4:] for line in code.splitlines())
    result = suite(code)
    result.assert_outcomes(passed=5)
    lines = [line.split()[1:] for line in result.outlines if line.startswith("child ")]
    assert [len(line) for line in lines] == [1, 1, 1, 1, 2]  # one child, for all tests
    pids = {int(pid) for line in lines for pid in line}
    assert len(pids) == 2
    eventually(lambda: all(map(gone, pids)), "a child outlives its suite")


# Benchmarks.


def test_a_benchmark_and_its_figures(suite: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = suite(BENCHMARK, "--benchmark-only", f"--benchmark-json={file}")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"*{SUMMARY}*", "test_transfer: * GB/s, *% of the limit of *"])
    (benchmark,) = benchmarks_of(file)
    info = benchmark["extra_info"]
    assert set(info) == {
        "gb_per_s",
        "limit_gb_per_s",
        "fraction_of_limit",
        "page_bytes",
        "total_bytes",
        "actual_path",
        "verified",
    }
    assert info["verified"] is True
    assert info["page_bytes"] == LAYOUT.page_bytes
    assert info["total_bytes"] == 3 * LAYOUT.block_bytes
    assert info["actual_path"].startswith("shared segment")
    rate = info["total_bytes"] / benchmark["stats"]["median"] / 1e9
    assert info["gb_per_s"] == pytest.approx(rate)
    assert info["fraction_of_limit"] == pytest.approx(rate / info["limit_gb_per_s"])
    assert (benchmark["stats"]["rounds"], benchmark["stats"]["iterations"]) == (3, 1)


@pytest.mark.parametrize(
    ("faulty", "options"),
    [
        (PROOF, ()),
        (WARMUP, ()),
        (MIDDLE, ()),
        (LAST, ()),
        (LAST_DISABLED, ("--benchmark-disable",)),
    ],
)
def test_a_put_that_copies_nothing_fails(
    suite: Callable[..., Any], tmp_path: Path, faulty: int, options: tuple[str, ...]
) -> None:
    file = tmp_path / "out.json"
    conftest = PLANT.format(faulty=faulty)
    result = suite(BENCHMARK, f"--benchmark-json={file}", *options, conftest=conftest)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*VerificationError: *the request: * words are wrong*"])
    assert SUMMARY not in result.stdout.str()
    assert benchmarks_of(file) == []


def test_a_rate_above_the_physical_limit_fails(suite: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    conftest = "import kvxfer.sweep.pair as p\np.Pair.physical_limit_gb_per_s = 1e-9"
    result = suite(BENCHMARK, f"--benchmark-json={file}", conftest=conftest)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*VerificationError: * is above the physical limit of *"])
    assert benchmarks_of(file) == []


def test_disabled_it_checks_and_times_nothing(suite: Callable[..., Any]) -> None:
    code = BENCHMARK.replace("    kvxfer_benchmark(", "    figures = kvxfer_benchmark(")
    code += "    assert figures.verified and figures.gb_per_s is None\n"
    result = suite(code, "--benchmark-disable")
    result.assert_outcomes(passed=1)
    assert SUMMARY not in result.stdout.str()


def test_without_pytest_benchmark_it_skips(suite: Callable[..., Any]) -> None:
    result = suite(BENCHMARK, "-p", "no:benchmark")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * kvxfer_benchmark needs pytest-benchmark; pip install*"])


# The factory, in this process.


@pytest.fixture
def make() -> Iterator[PairFactory]:
    processes = PeerProcesses()
    factory = PairFactory(processes)
    yield factory
    factory.close()
    processes.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "carrier-pigeon"}, "transport 'carrier-pigeon' is unknown"),
        ({"memory": "core"}, "memory 'core'; use shared, private or device"),
        ({"memory": "device"}, "device memory over shm"),
        ({"transport": "nvlink", "memory": "private"}, "private memory over nvlink"),
        ({"op": "send"}, "op 'send'; use put or get"),
        ({"num_blocks": 0, "transport": "loopback"}, "a KV cache needs at least one block"),
    ],
)
def test_wrong_arguments(make: PairFactory, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        make(**{"layout": LAYOUT, "num_blocks": 8, **options})


def test_what_is_not_here_says_why(make: PairFactory) -> None:
    found = available_transports()["nvlink"]
    if found.available:
        pytest.skip(reason="nvlink is available here, so nothing is refused")
    with pytest.raises(NotAvailable) as error:
        make(layout=LAYOUT, num_blocks=8, transport="nvlink")
    assert found.reason in str(error.value)


@pytest.fixture
def pair(make: PairFactory) -> Pair:
    return make(layout=LAYOUT, num_blocks=8, transport="loopback")


def test_a_pair_refuses_what_it_cannot_do(pair: Pair) -> None:
    pair.fill(0)
    with pytest.raises(InvalidUsage, match="get on a pair made for put; make it with op='get'"):
        pair.get([0], [1])
    with pytest.raises(InvalidUsage, match="the pool has 0 to 7"):
        pair.fill(0, [8])
    with pytest.raises(InvalidUsage, match="the pool has 0 to 7"):
        pair.check(0, [0], [-1])
    with pytest.raises(InvalidUsage, match="2 blocks, but 1 of the source"):
        pair.check(0, [0], [1, 2])
    for seed in (-1, 1 << 63):
        for act in (pair.fill, pair.fill_destination, lambda seed: pair.check(seed, [0], [1])):
            with pytest.raises(InvalidUsage, match=f"seed is {seed}; use 0 to "):
                act(seed)
    for num_bytes in (0, 8 * LAYOUT.block_bytes + 1):
        with pytest.raises(InvalidUsage, match=f"num_bytes is {num_bytes}; use 1 to "):
            pair.limit_copy(num_bytes)
    assert pair.limit_copy(8 * LAYOUT.block_bytes) > 0


def test_a_fill_of_no_blocks_fills_none(make: PairFactory) -> None:
    for op in ("put", "get"):
        pair = make(layout=LAYOUT, num_blocks=8, transport="loopback", op=op)
        pair.fill(1)
        pair.fill(2, [])
        pair.fill(3, [4])
        pair.transfer([0, 4], [1, 2])
        pair.check(1, [0], [1])
        pair.check(3, [4], [2])


def test_a_proof_sees_a_wrong_copy(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.prove([0, 1], [2, 3])
    monkeypatch.setattr("kvxfer.transport.loopback.copy_mapped", lambda *_: "memcpy")
    with pytest.raises(VerificationError, match="the request"):
        pair.prove([0, 1], [2, 3])


@pytest.mark.parametrize("op", ["put", "get"])
def test_a_proof_sees_a_limit_that_was_not_copied(
    make: PairFactory, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """One plane and blocks in order: the request has already brought those bytes."""
    layout = KVLayout(1, 1, head_dim=16, dtype="uint8", block_size=64, kv="mla")
    pair = make(layout=layout, num_blocks=4, transport="loopback", op=op)
    pair.prove([0, 1], [0, 1])
    monkeypatch.setattr(pair._rig, "limit_copy", lambda _: 1.0)
    with pytest.raises(VerificationError, match="the contiguous copy"):
        pair.prove([0, 1], [0, 1])


def test_a_round_times_a_ready_plan_and_fills_before_each_copy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def record(target: object, name: str) -> None:
        act = getattr(target, name)

        def call(*args: Any) -> Any:
            events.append(name)
            return act(*args)

        monkeypatch.setattr(target, name, call)

    for name in ("fill", "fill_prefix", "limit_copy", "wake", "move"):
        record(pair, name)
    record(pair.peer, "plan")
    rounds = _Rounds(pair, [0, 1], [2, 3])
    arguments, _ = rounds.prepare()
    assert events == ["fill_prefix", "limit_copy", "fill", "plan", "wake"]
    rounds.transfer(*arguments)
    assert events[5:] == ["move"]
    rounds.check()


def test_a_pair_closes_twice(pair: Pair) -> None:
    pair.close()
    pair.close()


def test_a_process_is_kept_for_the_next_pair_and_ended() -> None:
    processes = PeerProcesses()
    first = processes.take()
    second = processes.take()
    assert first is not second
    processes.give_back(first)
    assert processes.take() is first
    for process in (first, second):
        process.require_alive()
        processes.give_back(process)
    processes.close()
    for process in (first, second):
        with pytest.raises(PeerLost, match="ended with status 0"):
            process.require_alive()


def test_a_dead_process_is_told_and_replaced(make: PairFactory) -> None:
    first = make(layout=LAYOUT, num_blocks=8)
    (process,) = [first._rig._agent]
    process._process.kill()  # type: ignore[attr-defined]
    with pytest.raises(PeerLost, match="ended with status -9"):
        first.fill_destination(0)
    first.close()
    second = make(layout=LAYOUT, num_blocks=8)
    second.prove([0, 1], [2, 3])
