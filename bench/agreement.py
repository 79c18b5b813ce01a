"""Do `kvxfer diagnose`, `kvxfer sweep` and plain CUDA copies agree on this node, in one run?

    python bench/agreement.py --json agreement.json

For every ordered pair of the GPUs in ``--devices`` (CUDA's numbers): 256 MiB by
``cuMemcpyPeerAsync`` alone, before and after the two tools; the matrix of one ``kvxfer diagnose``;
the limit and the 16 KiB pages of ``kvxfer sweep``. Exit status: 0 where every ratio is within
``--tolerance``, 1 where one is not, 3 where there are no two GPUs.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

NUM_BYTES = 256 << 20
NUM_QUEUED = 8  # copies behind each other, so that starting them does not count
NUM_ROUNDS = 5
TOOL_S = 240.0
EXIT_DISAGREE, EXIT_NO_GPUS = 1, 3
_PEER_ACCESS_ALREADY_ENABLED = 704
Pair = tuple[int, int]


class Row(NamedTuple):
    """One comparison, in GB/s of one direction: a figure, and what it should agree with."""

    pair: Pair
    what: str
    gb_per_s: float
    reference: str
    reference_gb_per_s: float

    @property
    def ratio(self) -> float:
        """1 where the two agree."""
        return self.gb_per_s / self.reference_gb_per_s


class Driver:
    """The few calls of the CUDA driver that a plain copy takes."""

    def __init__(self) -> None:
        """OSError where there is no driver; RuntimeError where it does not start."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any, allow: int = 0) -> None:
        """One of them; a status other than 0 and ``allow`` ends the program."""
        status = getattr(self._cuda, name)(*arguments)
        if status not in (0, allow):
            raise RuntimeError(f"{name} failed with status {status}")

    def context(self, device: int) -> ctypes.c_void_p:
        """The primary context of a GPU."""
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        return context

    @contextmanager
    def memory(self, context: ctypes.c_void_p) -> Iterator[ctypes.c_uint64]:
        """256 MiB of a GPU."""
        pointer = ctypes.c_uint64()
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(NUM_BYTES))
        try:
            yield pointer
        finally:
            self.call("cuCtxSetCurrent", context)
            self.call("cuMemFree_v2", pointer)

    def num_gpus(self) -> int:
        """That this process sees."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value


def plain_gb_per_s(driver: Driver, pair: Pair) -> float:
    """The median round of ``cuMemcpyPeerAsync``, run by the source."""
    contexts = [driver.context(device) for device in pair]
    for one, other in (contexts, contexts[::-1]):
        driver.call("cuCtxSetCurrent", one)
        driver.call("cuCtxEnablePeerAccess", other, 0, allow=_PEER_ACCESS_ALREADY_ENABLED)
    with driver.memory(contexts[1]) as dst, driver.memory(contexts[0]) as src:
        copy = (dst, contexts[1], src, contexts[0], ctypes.c_size_t(NUM_BYTES), None)
        seconds = []
        for _ in range(NUM_ROUNDS + 1):
            start = time.perf_counter()
            for _ in range(NUM_QUEUED):
                driver.call("cuMemcpyPeerAsync", *copy)
            driver.call("cuCtxSynchronize")
            seconds.append(time.perf_counter() - start)
    return NUM_QUEUED * NUM_BYTES / median(seconds[1:]) / 1e9


def tool(*arguments: str) -> dict[str, Any]:
    """What a command of kvxfer wrote as JSON; a finding of diagnose is no error here."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        command = [sys.executable, "-m", "kvxfer", *arguments, "--json", str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_S, check=False, cwd=folder
        )
        if not path.exists():
            raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def sweep_of(pair: Pair) -> dict[str, Any]:
    """Pages of 16 KiB, of as many bytes as diagnose copies."""
    return tool(
        *("sweep", "--transport", "nvlink", "--devices", f"{pair[0]},{pair[1]}"),
        *("--page-bytes", "16k", "--total-bytes", str(NUM_BYTES), "--op", "put", "--iters", "5"),
    )


def diagnosed(report: dict[str, Any], kind: str) -> dict[Pair, float]:
    """Rates of a kind of figure, by CUDA's numbers; diagnose names GPUs by NVML's."""
    number = {f"gpu{gpu['index']}": gpu["cuda_index"] for gpu in report["facts"]["gpus"] or ()}
    return {
        (number[one["src"]], number[one["dst"]]): one["gb_per_s"]
        for one in report["figures"]["all"]
        if one["kind"] == kind and one["gb_per_s"] and not one["num_wrong"]
    }


def compare(
    plain: dict[Pair, list[float]], report: dict[str, Any], sweeps: dict[Pair, dict[str, Any]]
) -> list[Row]:
    """All comparisons; RuntimeError where a figure is missing or its bytes were wrong."""
    engine, paged = (diagnosed(report, kind) for kind in ("copy engine", "paged"))
    rows = []
    for pair, rates in plain.items():
        results = sweeps[pair]["results"]
        if pair not in engine or pair not in paged or not results:
            raise RuntimeError(f"no figure of {pair}: see the two tools by themselves")
        limit, pages = results[0]["limit_gb_per_s"], results[0]["gb_per_s"]["p50"]
        plainly = fmean(rates)
        rows += [
            Row(pair, "diagnose, contiguous", engine[pair], "cuMemcpyPeerAsync", plainly),
            Row(pair, "diagnose, contiguous", engine[pair], "sweep, limit", limit),
            Row(pair, "diagnose, 16 KiB pages", paged[pair], "sweep, 16 KiB pages", pages),
        ]
    return rows


def measure(driver: Driver, pairs: list[Pair]) -> list[Row]:
    """Plain copies first and last: what drifts meanwhile is in their mean."""
    plain = {pair: [plain_gb_per_s(driver, pair)] for pair in pairs}
    report = tool("diagnose")
    sweeps = {pair: sweep_of(pair) for pair in pairs}
    for pair in pairs:
        plain[pair].append(plain_gb_per_s(driver, pair))
    return compare(plain, report, sweeps)


def as_text(rows: list[Row], tolerance: float) -> str:
    """A line a comparison, with its ratio."""
    return "\n".join(
        f"{row.pair[0]} -> {row.pair[1]}  {row.what:<24} {row.gb_per_s:7.1f} GB/s   "
        f"{row.reference:<20} {row.reference_gb_per_s:7.1f} GB/s   {row.ratio:.3f}"
        f"{'' if agrees(row, tolerance) else '  DISAGREES'}"
        for row in rows
    )


def agrees(row: Row, tolerance: float) -> bool:
    """Whether a ratio is within the tolerance of 1."""
    return abs(row.ratio - 1.0) <= tolerance


def main() -> int:
    """Measure, print, and say by the status whether all agree."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", default="0,1", help="CUDA's numbers (default: 0,1)")
    parser.add_argument("--tolerance", type=float, default=0.05, help="of 1 (default: 0.05)")
    parser.add_argument("--json", metavar="FILE", help="the comparisons as a list of objects")
    args = parser.parse_args()
    devices = [int(device) for device in args.devices.split(",")]
    try:
        driver = Driver()
        num_gpus = driver.num_gpus()
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"no GPUs here: {error}\n")
        return EXIT_NO_GPUS
    if len(set(devices)) < 2 or max(devices) >= num_gpus:
        sys.stderr.write(f"--devices {args.devices} of {num_gpus} GPUs; name two or more\n")
        return EXIT_NO_GPUS
    rows = measure(driver, list(permutations(devices, 2)))
    sys.stdout.write(as_text(rows, args.tolerance) + "\n")
    if args.json is not None:
        found = [row._asdict() | {"ratio": row.ratio} for row in rows]
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(agrees(row, args.tolerance) for row in rows) else EXIT_DISAGREE


if __name__ == "__main__":
    sys.exit(main())
