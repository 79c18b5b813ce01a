"""``kvxfer diagnose`` on real GPUs: what it measures, and that its checks see planted faults."""

from pathlib import Path

import numpy as np
import pytest
from diagnose_command import judged

from kvxfer import _core
from kvxfer.diagnose.figures import ENGINE, KERNEL, PAGED, PINNED
from kvxfer.diagnose.inventory.nvml import read_nvml
from kvxfer.diagnose.measure.cuda_node import CudaNode
from kvxfer.diagnose.measure.node import PAGE_BYTES, Copy
from kvxfer.errors import InvalidUsage
from kvxfer.layout import CopyPlan

AREA_BYTES = 64 * PAGE_BYTES


@pytest.fixture(scope="module")
def node() -> CudaNode:
    return CudaNode({0: 0}, AREA_BYTES, num_queued=2)


@pytest.mark.parametrize("kind", [ENGINE, KERNEL, PAGED])
def test_a_copy_arrives_and_is_checked(node: CudaNode, kind: str) -> None:
    copy = Copy(src=0, dst=0, run_by=0, kind=kind, num_pages=32, first_dst_page=16)
    node.fill(0, 5)
    assert node.run([copy]) > 0
    assert node.check(copy, 5).num_words == 0
    assert node.check(copy, 6).num_words == copy.num_bytes // 8  # of another round


def test_a_wrong_word_is_found_where_it_is(node: CudaNode) -> None:
    copy = Copy(src=0, dst=0, run_by=0, kind=PAGED, num_pages=32)
    node.fill(0, 7)
    node.run([copy])
    word = np.array([0x1234567], np.uint64)
    address = node.memory[0].destination_address + 9 * PAGE_BYTES + 64
    node.memory[0].copy(CopyPlan.contiguous(word.ctypes.data, address, word.nbytes), ENGINE)
    found = node.check(copy, 7)
    assert (found.num_words, found.first) == (1, "page 9")


def test_a_read_of_memory_takes_time_and_is_right(node: CudaNode) -> None:
    nanoseconds, wrong = node.read_latency(0, 0)
    assert nanoseconds > 0
    assert wrong.num_words == 0


def test_a_ring_is_checked_before_it_is_followed() -> None:
    buffer = _core.DeviceBuffer(0, 4096)
    with pytest.raises(InvalidUsage, match="power of two"):
        _core.chase_pointers(0, buffer.address, 3, 128, 8)
    with pytest.raises(InvalidUsage, match="multiple of 8"):
        _core.chase_pointers(0, buffer.address, 4, 4, 8)


def test_what_nvml_says_of_the_gpu() -> None:
    found = read_nvml()
    seen = [gpu for gpu in found.gpus or () if gpu.cuda_index is not None]
    assert len(seen) == _core.device_count()
    for gpu in seen:
        assert gpu.uuid == _core.device_info(gpu.cuda_index or 0).uuid
    assert found.cuda_status == 0


def test_the_command_measures_the_gpu(tmp_path: Path) -> None:
    report, verdicts, printed = judged("--gentle", tmp_path)
    assert (verdicts["bytes"], verdicts["measured"]) == ("PASS", "PASS"), printed
    pinned = [one for one in report["figures"]["all"] if one["kind"] == PINNED]
    assert {one["dst"] for one in pinned} | {one["src"] for one in pinned} >= {"gpu0"}
