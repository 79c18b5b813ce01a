"""What a tuning measures: its areas, steps and candidates."""

import msgspec
import pytest
from tuning_profiles import profile_of

from kvxfer.sweep.tune.plan import Area, Step, areas_of, steps_of
from kvxfer.tuning import Profile, Rule, Section

SHARED = Area("shm", "shared")
NVLINK = Area("nvlink", "device")


def names_of(steps: list[Step]) -> list[str]:
    return [step.name for step in steps]


def test_the_steps_of_each_area(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    assert names_of(steps_of(SHARED, quick=False)) == ["threads", "engine"]
    assert names_of(steps_of(Area("shm", "private"), quick=True)) == ["threads"]
    network = Area("nixl", "private")
    assert names_of(steps_of(network, quick=False)) == ["threads", "slots", "engine"]
    assert names_of(steps_of(network, quick=True)) == ["slots", "engine"]
    assert names_of(steps_of(NVLINK, quick=False, max_sms=132)) == ["SMs", "engine"]
    assert names_of(steps_of(Area("nixl", "device"), quick=False, max_sms=132)) == [
        "slots",
        "SMs",
        "engine",
    ]
    assert names_of(steps_of(Area("ucx", "device"), quick=False, max_sms=132)) == [
        "slots",
        "engine",
    ]
    (sms, _) = steps_of(NVLINK, quick=False, max_sms=20)
    assert [one.name for one in sms.candidates] == ["8 SMs", "16 SMs"]


def test_one_cpu_has_no_threads_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert steps_of(Area("shm", "private"), quick=False) == []


def test_the_areas() -> None:
    assert areas_of(("shm", "ucx"), has_gpus=False) == [
        Area("shm", "shared"),
        Area("shm", "private"),
        Area("ucx", "private"),
    ]
    assert areas_of(("nvlink", "nixl"), has_gpus=True) == [
        Area("nvlink", "device"),
        Area("nixl", "private"),
        Area("nixl", "device"),
    ]


def test_candidates_are_profiles_that_can_be_read() -> None:
    for area in (SHARED, NVLINK, Area("nixl", "device"), Area("ucx", "private")):
        base = Section(transport=area.transport, memory=area.memory)
        for step in steps_of(area, quick=False, max_sms=132):
            for one in step.candidates:
                made = (
                    msgspec.structs.replace(
                        base, rules=(msgspec.structs.replace(Rule(op="put"), **one.fields),)
                    )
                    if step.by_point
                    else msgspec.structs.replace(base, **one.fields)
                )
                profile = profile_of(made)
                assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile
