"""The profile of a process: which is loaded, which is refused, and what transports get of it."""

import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tuning_profiles import profile_of, written

from kvxfer.layout import CopyPlan
from kvxfer.layout.copy_plan import CopyBox
from kvxfer.memory import MemoryKind
from kvxfer.transport import candidates, tuned, ucx
from kvxfer.transport.host_copy import choose_num_threads, default_num_threads
from kvxfer.transport.network_libraries import library_versions
from kvxfer.transport.nixl import staging
from kvxfer.transport.tuned import Loaded, host_fingerprint
from kvxfer.tuning import DEFAULT_RULE, NO_SECTION, Rule, Section, Slots

SHARED = Section(
    transport="shm", memory="shared", num_threads=1, rules=(Rule(op="put", engine="streaming"),)
)
UCX = Section(transport="ucx", memory="private", num_threads=1)


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a process that has loaded nothing, whose user has no profile."""
    monkeypatch.setattr(tuned, "_PROCESS", tuned._Process())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KVXFER_TUNING", raising=False)


def contiguous(num_bytes: int) -> CopyPlan:
    return CopyPlan.contiguous(4096, 1 << 30, num_bytes)


def test_without_a_profile_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert tuned.section("shm", "shared") is NO_SECTION
    assert tuned.rule_for(NO_SECTION, "put", contiguous(4096)) is DEFAULT_RULE
    assert not caplog.records
    assert tuned.in_use().text == "none; `kvxfer tune` makes one"


def test_the_profile_of_the_default_place_is_used_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    written(tmp_path / "config" / "kvxfer", SHARED)
    for _ in range(2):
        assert tuned.section("shm", "shared") == SHARED
        assert tuned.section("shm", "private") is NO_SECTION
    (said,) = caplog.records
    assert said.levelno == logging.INFO
    assert f"{tmp_path}/config/kvxfer/tuning.json" in said.getMessage()


def test_off_wins_over_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "config" / "kvxfer", SHARED)
    monkeypatch.setenv("KVXFER_TUNING", "off")
    assert tuned.section("shm", "shared") is NO_SECTION
    assert tuned.in_use() == Loaded()


def test_a_named_file_wins_over_the_default_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "config" / "kvxfer", SHARED)
    monkeypatch.setenv("KVXFER_TUNING", str(written(tmp_path, UCX)))
    assert tuned.section("shm", "shared") is NO_SECTION
    assert tuned.in_use().path == tmp_path / "tuning.json"


@pytest.mark.parametrize("field", ["kvxfer", "system", "cpu", "cpus", "gpus", "driver", "cuda"])
def test_a_profile_of_another_machine_is_refused(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = msgspec.structs.replace(host_fingerprint(), **{field: "another"})
    monkeypatch.setenv("KVXFER_TUNING", str(written(tmp_path, SHARED, fingerprint=other)))
    for _ in range(2):
        assert tuned.section("shm", "shared") is NO_SECTION
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    own = getattr(host_fingerprint(), field) or "none"
    assert f"{field} is another in the profile and {own} here" in said.getMessage()
    assert "run `kvxfer tune` here" in said.getMessage()
    assert tuned.in_use().text.startswith("refused: it is of another machine")


def test_the_fingerprint_is_the_same_whatever_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = host_fingerprint()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert host_fingerprint() == before


@pytest.mark.parametrize("theirs", ["0.1", None])
def test_a_section_of_another_library_is_refused(
    theirs: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    libraries = {} if theirs is None else {"ucx": theirs}
    path = written(tmp_path, SHARED, UCX, fingerprint=host_fingerprint(libraries))
    monkeypatch.setenv("KVXFER_TUNING", str(path))
    for _ in range(2):
        assert tuned.section("ucx", "private", library=lambda: "1.22.0") is NO_SECTION
    assert tuned.section("shm", "shared") == SHARED
    (said,) = caplog.records
    assert f"ucx is {theirs or 'none'} in the profile and 1.22.0 here" in said.getMessage()
    if theirs is not None:
        assert tuned.section("ucx", "private", library=lambda: theirs) == UCX


def test_a_damaged_file_is_warned_of_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("{")
    monkeypatch.setenv("KVXFER_TUNING", str(path))
    assert tuned.section("shm", "shared") is NO_SECTION
    (said,) = caplog.records
    assert str(path) in said.getMessage()
    assert "the defaults are used" in said.getMessage()


def test_a_named_file_that_is_not_there_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVXFER_TUNING", str(tmp_path / "none.json"))
    assert tuned.section("shm", "shared") is NO_SECTION
    assert "there is no such file" in caplog.text


def test_a_relative_path_is_warned_of_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, SHARED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVXFER_TUNING", "tuning.json")
    assert tuned.section("shm", "shared") is NO_SECTION
    assert "its path is relative" in caplog.text


def test_a_profile_can_be_used_for_a_while() -> None:
    with tuned.using(profile_of(SHARED)):
        assert tuned.section("shm", "shared") == SHARED
        with tuned.using(profile_of()):
            assert tuned.section("shm", "shared") is NO_SECTION
        assert tuned.section("shm", "shared") == SHARED
    assert tuned.section("shm", "shared") is NO_SECTION


def test_the_order_is_the_profiles_within_a_host() -> None:
    default = candidates(MemoryKind.HOST)
    beyond = candidates(MemoryKind.HOST, beyond_host=True)
    assert default[0] == "shm"
    with tuned.using(profile_of(order={"host": ("ucx", "unknown", "shm")})):
        assert candidates(MemoryKind.HOST) == ("ucx", "shm", "nixl")
        assert candidates(MemoryKind.HOST, beyond_host=True) == beyond
        assert candidates(MemoryKind.DEVICE)[0] == "nvlink"


def test_an_order_of_another_library_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    default = candidates(MemoryKind.HOST)
    order = ("ucx", "nixl", "shm")
    theirs = host_fingerprint({**library_versions(), "nixl": "0.0.1"})
    with tuned.using(profile_of(order={"host": order}, fingerprint=theirs)):
        for _ in range(2):
            assert candidates(MemoryKind.HOST) == default
    (said,) = caplog.records
    assert "nixl is 0.0.1 in the profile" in said.getMessage()
    assert "the default order" in said.getMessage()
    # One that names it in its place, or not at all, says nothing new of it.
    with tuned.using(profile_of(order={"host": default}, fingerprint=theirs)):
        assert candidates(MemoryKind.HOST) == default
    with tuned.using(profile_of(order={"host": ("ucx", "shm")}, fingerprint=theirs)):
        assert candidates(MemoryKind.HOST) == ("ucx", "shm", "nixl")
    assert len(caplog.records) == 1


def test_threads_are_as_asked_or_by_the_profile_or_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = Section(transport="shm", memory="shared", num_threads=64)
    assert choose_num_threads(3, many) == 3
    assert choose_num_threads(None, NO_SECTION) == default_num_threads()
    assert choose_num_threads(None, SHARED) == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert choose_num_threads(None, many) == 3


def box(run_bytes: int, num_segments: int) -> CopyBox:
    return CopyBox(0, 1, 0, num_segments, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, run_bytes)


def test_a_plan_is_known_by_the_runs_of_most_of_its_bytes() -> None:
    planes = np.zeros(1, np.uint64)
    segments = np.zeros((8, 4), np.uint32)
    plan = CopyPlan(planes, planes, segments=segments, boxes=(box(4096, 1), box(1024, 8)))
    assert tuned.key_of(plan) == (1024, 4096 + 8 * 1024)
    assert tuned.key_of(contiguous(4096)) == (4096, 4096)
    empty = CopyPlan(planes, planes, segments=segments, boxes=())
    assert tuned.key_of(empty) == (0, 0)


def test_a_conversion_goes_by_the_defaults() -> None:
    planes = np.zeros(1, np.uint64)
    segments = np.zeros((1, 4), np.uint32)
    plain = CopyPlan(planes, planes, segments=segments, boxes=(box(4096, 1),))
    converts = CopyPlan(
        planes, planes, segments=segments, boxes=(box(4096, 1),), conversion="bfloat16"
    )
    assert tuned.rule_for(SHARED, "put", plain).engine == "streaming"
    assert tuned.rule_for(SHARED, "put", converts) is DEFAULT_RULE


PINNED = Slots(place="pinned", num_slots=3, slot_bytes=1 << 20)
DEVICE = Slots(place="device", num_slots=5, slot_bytes=1 << 22)


def test_slots_are_of_the_place_that_a_connection_has() -> None:
    section = Section(transport="nixl", memory="device", slots=(PINNED, DEVICE))
    for slots in (PINNED, DEVICE):
        shape = staging.shape_of(staging.Place(slots.place), section)
        assert shape == (slots.num_slots, slots.slot_bytes)
        assert shape.as_slots(staging.Place(slots.place)) == slots
    for place in staging.Place:
        assert staging.shape_of(place, NO_SECTION) == staging.SHAPES[place]
    assert staging.shape_of(staging.Place.HOST, section) == staging.SHAPES[staging.Place.HOST]


def test_slots_of_ucx_are_pinned_for_a_gpu() -> None:
    section = Section(transport="ucx", memory="device", slots=(PINNED,))
    assert ucx.slots_of(0, section) == PINNED
    assert ucx.slots_of(-1, section).place == "host"
    assert ucx.slots_of(0, NO_SECTION).slot_bytes == 8 << 20
