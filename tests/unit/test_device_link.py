"""The link over a GPU's copier, with a copier that no GPU stands behind."""

from typing import Any

import numpy as np
import pytest

from kvxfer import _core
from kvxfer.errors import InvalidUsage, TransferTimeout
from kvxfer.layout import CopyPlan
from kvxfer.transport import Board, Op, Tuning, device_copy
from kvxfer.transport.board import PeerSlot
from kvxfer.transport.device_copy import ENGINES, DeviceLink
from kvxfer.tuning import ENGINES_OF, NO_SECTION, Rule, Section

EMPTY = CopyPlan(
    np.zeros(1, np.uint64),
    np.zeros(1, np.uint64),
    segments=np.zeros((0, 4), np.uint32),
    boxes=(),
)


class FakeCopier:
    """Notes what it is asked, and fails as it is told."""

    MAX_IN_FLIGHT = _core.DeviceCopier.MAX_IN_FLIGHT

    def __init__(self, *_: object) -> None:
        self.sequences: list[int] = []
        self.run_by: list[tuple[int, Any]] = []  # SMs and engine
        self.timeouts_s: list[float] = []
        self.post_error: BaseException | None = None
        self.wait_error: BaseException | None = None
        self.done = True

    def post(
        self, tables: object, slot: int, sequence: int, num_sms: int, engine: Any, *_: object
    ) -> Any:
        self.sequences.append(sequence)
        self.run_by.append((num_sms, engine))
        if self.post_error is not None:
            raise self.post_error
        return _core.CopyEngine.DMA

    def wait(self, slot: int, sequence: int, timeout_s: float) -> bool:
        self.timeouts_s.append(timeout_s)
        if self.wait_error is not None:
            raise self.wait_error
        return self.done


def link_by(section: Section, monkeypatch: pytest.MonkeyPatch) -> DeviceLink:
    monkeypatch.setattr(_core, "DeviceCopier", FakeCopier)
    board = Board()
    return DeviceLink(
        0,
        PeerSlot(board.describe(board.take_slot())),
        region_addresses=np.zeros(1, np.uint64),
        region_bytes=[0],
        path="nowhere",
        section=section,
    )


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> DeviceLink:
    return link_by(NO_SECTION, monkeypatch)


def copier_of(link: DeviceLink) -> FakeCopier:
    copier: Any = link.copier
    assert isinstance(copier, FakeCopier)
    return copier


def test_a_transfer_says_its_number(link: DeviceLink) -> None:
    assert [link.post(EMPTY, Op.PUT).sequence for _ in range(3)] == [1, 2, 3]
    assert copier_of(link).sequences == [1, 2, 3]


@pytest.mark.parametrize("error", [InvalidUsage("no"), TypeError("no")], ids=repr)
def test_a_refused_post_does_not_count(link: DeviceLink, error: Exception) -> None:
    copier_of(link).post_error = error
    with pytest.raises(type(error), match="no"):
        link.post(EMPTY, Op.PUT)
    copier_of(link).post_error = None
    assert link.post(EMPTY, Op.PUT).sequence == 1


def test_a_link_is_full_while_its_oldest_copy_is_in_flight(link: DeviceLink) -> None:
    copier = copier_of(link)
    copier.done = False
    for _ in range(copier.MAX_IN_FLIGHT):
        assert not link.is_full
        link.post(EMPTY, Op.PUT)
    assert link.is_full
    copier.done = True
    assert not link.is_full
    assert set(copier.timeouts_s) == {0.0}


def test_a_stream_that_cannot_be_marked_leaves_no_gap_in_the_numbers(
    link: DeviceLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: int, after: object) -> None:
        raise InvalidUsage(f"no stream {after} of GPU {device}")

    monkeypatch.setattr(device_copy, "mark", refuse)
    with pytest.raises(InvalidUsage, match="no stream 7 of GPU 0"):
        link.post(EMPTY, Op.PUT, after=7)
    monkeypatch.undo()
    assert link.post(EMPTY, Op.PUT).sequence == 1


def test_an_interrupted_post_keeps_its_number(link: DeviceLink) -> None:
    # Ctrl-C comes when the native call returns: the copy is queued, and will signal its number.
    copier_of(link).post_error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        link.post(EMPTY, Op.PUT)
    copier_of(link).post_error = None
    assert link.post(EMPTY, Op.PUT).sequence == 2
    assert copier_of(link).sequences == [1, 2]


def test_closing_waits_in_slices_until_its_deadline(
    link: DeviceLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = copier_of(link)
    copier.done = False
    monkeypatch.setattr(device_copy, "_CLOSE_S", 0.05)
    with pytest.raises(TransferTimeout, match=r"did not end within 0.05 s; .* close again"):
        link.close()
    assert max(copier.timeouts_s) <= 0.05
    monkeypatch.setattr(device_copy, "_CLOSE_S", 30.0)
    copier.timeouts_s.clear()
    copier.wait_error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        link.close()
    assert copier.timeouts_s == [pytest.approx(0.2)]
    copier.wait_error, copier.done = None, True
    link.close()
    with pytest.raises(InvalidUsage, match="this link is closed"):
        link.post(EMPTY, Op.PUT)


# By a tuning profile.

PAGES_BYTES = 4096
RULES = (
    Rule(op="put", max_run_bytes=8192, engine="dma", num_sms=24),
    Rule(op="put", min_run_bytes=8192, engine="bulk"),
)
NVLINK = Section(transport="nvlink", memory="device", rules=RULES)


def test_engines_of_a_profile_are_those_of_the_copier() -> None:
    assert tuple(ENGINES) == ENGINES_OF["nvlink"]


@pytest.mark.parametrize(
    ("op", "tuning", "num_sms", "engine"),
    [
        (Op.PUT, None, 24, "dma"),
        (Op.PUT, Tuning(), 24, "dma"),
        (Op.PUT, Tuning(num_sms=5), 5, "dma"),  # what is asked for comes first
        (Op.PUT, Tuning(engine="load_store"), 24, "load_store"),
        (Op.GET, None, device_copy.DEFAULT_NUM_SMS, "auto"),  # the rules are of puts
    ],
)
def test_a_rule_gives_sms_and_engine(
    op: Op, tuning: Tuning | None, num_sms: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = link_by(NVLINK, monkeypatch)
    link.post(CopyPlan.contiguous(4096, 8192, PAGES_BYTES), op, tuning=tuning)
    assert copier_of(link).run_by == [(num_sms, ENGINES[engine])]


@pytest.mark.parametrize(
    ("src", "num_bytes", "engine"),
    [
        (4096, 16384, "bulk"),
        (4096 + 8, 16384, "auto"),  # the bulk kernel would refuse these
        (4096, 16384 + 8, "auto"),
    ],
)
def test_the_bulk_kernel_is_for_aligned_pages(
    src: int, num_bytes: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = link_by(NVLINK, monkeypatch)
    link.post(CopyPlan.contiguous(src, 1 << 20, num_bytes), Op.PUT)
    ((_, used),) = copier_of(link).run_by
    assert used == ENGINES[engine]


def test_without_a_profile_each_copy_chooses(link: DeviceLink) -> None:
    link.post(CopyPlan.contiguous(4096, 8192, PAGES_BYTES), Op.PUT)
    link.post(CopyPlan.contiguous(4096, 8192, 64), Op.PUT)
    assert copier_of(link).run_by == [(8, ENGINES["auto"]), (16, ENGINES["auto"])]
