"""``kvxfer diagnose`` between two GPUs."""

from pathlib import Path

import pytest
from diagnose_command import judged

from kvxfer.diagnose.figures import BOTH_WAYS, ENGINE, KERNEL, LATENCY, PAGED
from kvxfer.diagnose.inventory.nvml import read_nvml
from kvxfer.diagnose.measure.cuda_node import CudaNode
from kvxfer.diagnose.measure.node import PAGE_BYTES, Copy

AREA_BYTES = 64 * PAGE_BYTES


@pytest.mark.parametrize("kind", [ENGINE, KERNEL, PAGED])
@pytest.mark.parametrize("run_by", [0, 1])
def test_a_copy_between_gpus_by_either(kind: str, run_by: int) -> None:
    node = CudaNode({0: 0, 1: 1}, AREA_BYTES, num_queued=2)
    copies = [
        Copy(src=src, dst=dst, run_by=run_by, kind=kind, num_pages=48, first_dst_page=8)
        for src, dst in ((0, 1), (1, 0))
    ]
    for gpu in node.gpus:
        node.fill(gpu, 11)
    node.run(copies)
    assert [node.check(copy, 11).num_words for copy in copies] == [0, 0]
    assert node.check(copies[0], 12).num_words == copies[0].num_bytes // 8


def test_reads_of_the_other_gpu_are_right() -> None:
    node = CudaNode({0: 0, 1: 1}, AREA_BYTES, num_queued=2)
    for src, dst in ((0, 1), (1, 0)):
        assert node.read_latency(src, dst)[1].num_words == 0


def test_nvml_and_cuda_agree_on_peer_access() -> None:
    found = read_nvml()
    pair = next(pair for pair in found.pairs if (pair.src, pair.dst) == (0, 1))
    assert pair.cuda_access
    assert pair.read == pair.write == "ok"


def test_the_command_fills_the_matrix(tmp_path: Path) -> None:
    report, verdicts, printed = judged("--quick", tmp_path)
    keys = {(one["kind"], one["src"], one["dst"]) for one in report["figures"]["all"]}
    for kind in (ENGINE, KERNEL, PAGED, LATENCY):
        assert {(kind, "gpu0", "gpu1"), (kind, "gpu1", "gpu0")} <= keys, printed
    assert (BOTH_WAYS, "gpu0", "gpu1") in keys
    assert (verdicts["bytes"], verdicts["measured"]) == ("PASS", "PASS"), printed
