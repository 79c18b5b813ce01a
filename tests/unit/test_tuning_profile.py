"""The profile as a file: what is read, and what is refused."""

import os
from pathlib import Path

import msgspec
import pytest
from tuning_profiles import profile_of, written

from kvxfer.errors import InvalidUsage, NotAvailable, ProfileRefused
from kvxfer.tuning import (
    DEFAULT_RULE,
    Check,
    Profile,
    Rule,
    Section,
    Slots,
    default_path,
    read_profile,
    require_profile_path,
    write_profile,
)
from kvxfer.tuning.file import MAX_BYTES
from kvxfer.tuning.profile import encode

MIB = 1 << 20
MIDDLE = Rule(
    op="put",
    min_run_bytes=8192,
    max_run_bytes=32768,
    min_total_bytes=MIB,
    max_total_bytes=16 * MIB,
    engine="streaming",
)
SHARED = Section(transport="shm", memory="shared", num_threads=1, rules=(MIDDLE,))
NIXL = Section(
    transport="nixl",
    memory="device",
    slots=(
        Slots(place="pinned", num_slots=2, slot_bytes=MIB),
        Slots(place="device", num_slots=8, slot_bytes=4 * MIB),
    ),
)
CHECK = Check(
    transport="shm",
    memory="shared",
    op="put",
    run_bytes=16384,
    total_bytes=MIB,
    default_us=100.0,
    profile_us=80.0,
    gain=0.2,
    noise=0.05,
    verdict="gain",
)


def edited(**fields: object) -> bytes:
    """A profile's text with other values of its own fields."""
    found = msgspec.json.decode(encode(profile_of(SHARED, NIXL)))
    return msgspec.json.encode(found | fields)


def with_rule(**fields: object) -> bytes:
    section = msgspec.to_builtins(SHARED)
    section["rules"] = [msgspec.to_builtins(MIDDLE) | fields]
    return edited(sections=[section])


SECTION = {"transport": "shm", "memory": "shared"}
SLOTS = {"place": "pinned", "num_slots": 2, "slot_bytes": MIB}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    profile = profile_of(SHARED, NIXL, order={"host": ("nixl", "shm")}, checks=(CHECK,))
    path = tmp_path / "new" / "folder" / "tuning.json"
    write_profile(path, profile)
    assert read_profile(path) == profile
    write_profile(path, profile_of())  # over what is there
    assert read_profile(path) == profile_of()
    assert [one.name for one in path.parent.iterdir()] == ["tuning.json"]


def test_fields_of_a_later_kvxfer_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    later = msgspec.structs.replace(profile_of().fingerprint, kvxfer="999.0")
    path.write_bytes(edited(weather="fine", fingerprint=msgspec.to_builtins(later)))
    assert read_profile(path) == profile_of(SHARED, NIXL, fingerprint=later)


def test_no_file_is_no_profile(tmp_path: Path) -> None:
    assert read_profile(tmp_path / "none.json") is None
    assert read_profile(written(tmp_path) / "below a file") is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is no profile"),
        (b"{", "it is no profile"),
        (b"\xff\xfe\x00", "it is no profile"),
        (b"[" * 100_000, "it is no profile"),
        (b"[]", "it is no profile"),
        (b"{}", "missing required field `schema`"),
        (edited()[:-40], "it is no profile"),
        (edited(schema="kvxfer.tuning/2"), "of another version of kvxfer; this kvxfer reads"),
        (edited(schema="kvxfer.sweep/1"), "its schema is 'kvxfer.sweep/1'"),
        (edited(sections=[{"transport": "shm", "memory": "moon"}]), "Invalid enum value 'moon'"),
        (edited(sections=[{"transport": "carrier", "memory": "shared"}]), "transport 'carrier'"),
        (edited(sections=[SECTION, SECTION]), "two of section: shm, shared"),
        (edited(sections=[SECTION | {"slots": [SLOTS, SLOTS]}]), "two of slots .*: pinned"),
        (edited(weather="fine"), r"it has \$.weather, which no profile has"),
        (edited(sections=[SECTION | {"num_thread": 1}]), r"\$.sections\[0\].num_thread"),
        (with_rule(min_run_byte=1), r"\$.sections\[0\].rules\[0\].min_run_byte"),
        (with_rule(min_run_bytes=9, max_run_bytes=8), "min_run_bytes 9 and max_run_bytes 8"),
        (with_rule(min_total_bytes=9, max_total_bytes=9), "min_total_bytes 9 and max_total_bytes"),
        (edited(order={"host": ["x" * 65]}), "length <= 64"),
        (with_rule(engine="dma"), "engine 'dma' over shm, which has auto, memcpy, streaming"),
        (with_rule(op="push"), "Invalid enum value 'push'"),
        (with_rule(min_run_bytes=-1), ">= 0"),
        (with_rule(num_sms=5000), "<= 4096"),
        (edited(fingerprint={"kvxfer": "1"}), "missing required field `system`"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(data)
    with pytest.raises(ProfileRefused, match=message):
        read_profile(path)


@pytest.mark.parametrize("field", ["num_slots", "slot_bytes"])
@pytest.mark.parametrize("value", [0, 1 << 40, 4097])
def test_slots_out_of_range_are_refused(tmp_path: Path, field: str, value: int) -> None:
    slots = {"place": "host", "num_slots": 4, "slot_bytes": MIB, field: value}
    path = tmp_path / "tuning.json"
    path.write_bytes(edited(sections=[{"transport": "ucx", "memory": "private", "slots": [slots]}]))
    with pytest.raises(ProfileRefused, match=field):
        read_profile(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    data = edited()
    path.write_bytes(data + b" " * (MAX_BYTES - len(data)))
    assert read_profile(path) is not None
    path.write_bytes(data + b" " * (MAX_BYTES + 1 - len(data)))
    with pytest.raises(ProfileRefused, match=f"more than {MAX_BYTES} bytes"):
        read_profile(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ProfileRefused, match="no regular file"):
        read_profile(tmp_path / "fifo")
    with pytest.raises(ProfileRefused, match=r"regular file|directory"):
        read_profile(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ProfileRefused, match="cannot be read"):
        read_profile(tmp_path / "loop")


def test_a_profile_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    below_a_file = written(tmp_path) / "tuning.json"
    with pytest.raises(InvalidUsage, match="cannot write"):
        write_profile(below_a_file, profile_of())


def test_where_nothing_can_be_written_is_known_before(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    require_profile_path(folder / "tuning.json")
    require_profile_path(written(tmp_path))
    assert not folder.exists()
    assert [one.name for one in tmp_path.iterdir()] == ["tuning.json"]
    os.mkfifo(tmp_path / "fifo")
    for path, reason in (
        (Path("/dev/null"), "it is no regular file"),
        (tmp_path, "it is no regular file"),
        (tmp_path / "fifo", "it is no regular file"),
        (tmp_path / "tuning.json" / "below" / "a file.json", "Not a directory"),
        (Path("/proc/kvxfer/tuning.json"), "No such file"),
    ):
        with pytest.raises(InvalidUsage, match=f"cannot write '{path}': {reason}"):
            require_profile_path(path)


@pytest.mark.parametrize(
    ("op", "run_bytes", "total_bytes", "is_found"),
    [
        ("put", 8192, MIB, True),
        ("put", 32767, 16 * MIB - 1, True),
        ("put", 8191, MIB, False),
        ("put", 32768, MIB, False),
        ("put", 8192, MIB - 1, False),
        ("put", 8192, 16 * MIB, False),
        ("get", 8192, MIB, False),
    ],
)
def test_a_rule_holds_in_its_box(op: str, run_bytes: int, total_bytes: int, is_found: bool) -> None:
    found = SHARED.rule_for(op, run_bytes, total_bytes)
    assert found is (MIDDLE if is_found else DEFAULT_RULE)


def test_sections_and_slots_are_found_by_name() -> None:
    profile = profile_of(SHARED, NIXL)
    assert profile.section("shm", "shared") is SHARED
    assert profile.section("shm", "private").is_empty
    assert NIXL.slots_in("device") == NIXL.slots[1]
    assert NIXL.slots_in("host") is None


def test_an_empty_profile_knows_it() -> None:
    def is_empty(profile: Profile) -> bool:
        return profile.is_empty

    assert is_empty(profile_of())
    assert is_empty(profile_of(Section(transport="shm", memory="shared"), checks=(CHECK,)))
    assert not is_empty(profile_of(NIXL))
    assert not is_empty(profile_of(order={"host": ("nixl", "shm")}))


def test_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_path() == tmp_path / "kvxfer" / "tuning.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_path() == Path("/home/somebody/.config/kvxfer/tuning.json")

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(NotAvailable, match="KVXFER_TUNING"):
        default_path()
