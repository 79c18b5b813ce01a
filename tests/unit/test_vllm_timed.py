"""A connector that notes times is the connector that it was, and what it writes is bounded."""

import sys
from abc import abstractmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_interfaces import interfaces

from kvxfer.connectors.vllm import cpu_event, timed, timings
from kvxfer.connectors.vllm.interface import describe
from kvxfer.connectors.vllm.timed import token_bytes
from kvxfer.connectors.vllm.timings import Event, Timings, read_events
from kvxfer.errors import InvalidUsage

SCHEDULER, WORKER = SimpleNamespace(name="SCHEDULER"), SimpleNamespace(name="WORKER")
SPEC = SimpleNamespace(page_size_bytes=1 << 16, block_size=16)
CACHE = SimpleNamespace(
    kv_cache_groups=[SimpleNamespace(kv_cache_spec=SPEC, layer_names=["a", "b"])]
)


class Marker:
    """An interface that a connector supports."""


class Base:
    """vLLM's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.made_with = (vllm_config, role, kv_cache_config)
        self.metadata: Any = None

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num: int) -> tuple[int | None, bool]: ...

    def on_new_request(self, request: Any) -> None: ...

    def update_state_after_alloc(self, request: Any, blocks: Any, num: int) -> None: ...

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self.metadata = connector_metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        return None, None


class Store(Base, Marker):
    """A connector to be timed; ``answers`` are given one after another."""

    answers: tuple[tuple[int | None, bool], ...] = ((None, False), (512, True))

    def get_num_new_matched_tokens(self, request: Any, num: int) -> tuple[int | None, bool]:
        self.left = getattr(self, "left", list(self.answers))
        return self.left.pop(0)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return SimpleNamespace()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        return {"sent"}, {"r"}

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config["layerwise"])


class Results(Store):
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return SimpleNamespace(finished_recving={"r"})


class Sync(Store):
    answers = ((256, False),)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        return None, None


class NoPlace(Store):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return object()  # takes no attribute


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "timings.jsonl"
    monkeypatch.setenv("KVXFER_TIMINGS", str(path))
    return path


def step(*scheduled: str, finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(scheduled, 1), finished_req_ids=set(finished)
    )


def run(inner: type, num_asks: int, *, num_external: int) -> Any:
    """A request through both sides of a timed connector; returns the worker's."""
    kind: Any = timed.timed(inner)
    scheduler, worker = kind("config", SCHEDULER, CACHE), kind("config", WORKER, CACHE)
    request = SimpleNamespace(request_id="r")
    scheduler.on_new_request(request)
    for _ in range(num_asks):
        scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, None, num_external)
    worker.bind_connector_metadata(scheduler.build_connector_meta(step()))
    worker.start_load_kv(None)
    worker.wait_for_layer_load("a")
    worker.wait_for_save()
    worker.get_finished(set())
    scheduler.build_connector_meta(step("r"))
    scheduler.build_connector_meta(step("r"))
    return worker


def whats(path: Path) -> list[str]:
    return [event.what for event in read_events(path)]


def test_a_load_between_steps_is_noted_in_order(file: Path) -> None:
    run(Store, 2, num_external=512)
    events = list(read_events(file))
    assert [event.what for event in events] == [
        *("cache", "arrived", "asked", "answered", "placed", "begun", "loaded", "scheduled")
    ]
    assert events[0].token_bytes == 2 * (1 << 16) // 16
    assert events[3].num_tokens == 512
    assert {event.request for event in events[1:]} == {"r"}
    times_s = [event.at_s for event in events]
    assert times_s == sorted(times_s)


def test_a_load_inside_a_step_ends_with_it_and_waits_for_layers(file: Path) -> None:
    run(Sync, 1, num_external=256)
    assert whats(file)[-4:] == ["begun", "loaded", "waited", "scheduled"]
    waited = next(event for event in read_events(file) if event.what == "waited")
    assert 0.0 <= waited.seconds < 1.0


def test_nothing_there_is_neither_placed_nor_loaded(file: Path) -> None:
    class Empty(Sync):
        answers = ((0, False),)

    run(Empty, 1, num_external=0)
    assert whats(file) == ["cache", "arrived", "asked", "answered", "scheduled"]


def test_metadata_without_a_place_loses_the_begin_alone(file: Path) -> None:
    run(NoPlace, 2, num_external=512)
    assert "begun" not in whats(file)
    assert whats(file)[-2:] == ["loaded", "scheduled"]


def test_results_in_one_answer_are_noted_too(file: Path) -> None:
    kind: Any = timed.timed(Results)
    worker = kind("config", WORKER, CACHE)
    assert worker.get_transfer_results(set()).finished_recving == {"r"}
    assert whats(file) == ["loaded"]
    assert not hasattr(timed.timed(Store), "get_transfer_results")


def test_all_else_is_the_connectors_own(file: Path) -> None:
    kind: Any = timed.timed(Store)
    assert (kind.__name__, timed.timed(Store)) == ("Store", kind)
    assert issubclass(kind, Marker)
    assert kind.requires_piecewise_for_cudagraph({"layerwise": True})
    one = kind("config", WORKER, CACHE)
    assert one.made_with == ("config", WORKER, CACHE)
    assert one.prefer_cross_layer_blocks
    assert one.get_finished(set()) == ({"sent"}, {"r"})
    request = SimpleNamespace(request_id="r")
    assert one.get_num_new_matched_tokens(request, 0) == (None, False)
    assert one.get_num_new_matched_tokens(request, 0) == (512, True)


def test_a_request_that_ended_is_noted_anew(file: Path) -> None:
    kind: Any = timed.timed(Store)
    scheduler = kind("config", SCHEDULER, CACHE)
    for _ in range(2):
        scheduler.on_new_request(SimpleNamespace(request_id="r"))
        scheduler.on_new_request(SimpleNamespace(request_id="r"))
        scheduler.build_connector_meta(step(finished=("r",)))
    assert whats(file) == ["cache", "arrived", "arrived"]


@pytest.mark.parametrize("release", interfaces())
def test_every_hook_takes_what_the_release_passes(release: str) -> None:
    theirs = interfaces()[release]
    own = {name: method for name, method in describe(timed._TimedResults).items() if name[0] != "_"}
    assert set(timed._NEEDED) == own.keys() - {"get_transfer_results"}
    for name, method in own.items():
        if name in theirs:
            assert method.parameters == theirs[name].parameters, name


def test_what_cannot_be_timed_is_refused_by_name() -> None:
    class TwoArguments:
        def __init__(self, vllm_config: Any, role: Any) -> None: ...

    with pytest.raises(InvalidUsage, match=r"TwoArguments .*get_finished.*argument kv_cache_conf"):
        timed.timed(TwoArguments)


def test_a_name_is_of_vllms_registry_or_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "stand_in", lambda: None)
    factory = ModuleType("factory")
    by_name = {"StoreConnector": Store}
    factory.KVConnectorFactory = SimpleNamespace(  # type: ignore[attr-defined]
        get_connector_class_by_name=by_name.__getitem__
    )
    monkeypatch.setitem(sys.modules, timed._FACTORY, factory)
    for parent in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, timed._FACTORY.rpartition(".")[0], ModuleType("x"))
    assert timed.StoreConnector is timed.timed(Store)
    assert getattr(timed, f"{__name__}:Sync") is timed.timed(Sync)
    with pytest.raises(AttributeError):
        _ = timed.__path__


def test_layers_of_one_spec_and_of_several() -> None:
    several = SimpleNamespace(page_size_bytes=3 << 16, block_size=16, kv_cache_specs={})
    group = SimpleNamespace(kv_cache_spec=several, layer_names=["a", "b", "c"])
    assert token_bytes(SimpleNamespace(kv_cache_groups=[group])) == (3 << 16) // 16
    assert token_bytes(None) == 0


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVXFER_TIMINGS", raising=False)
    monkeypatch.chdir(tmp_path)
    run(Store, 2, num_external=512)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    lost = Timings(tmp_path / "none" / "file")
    lost.note("asked", "r")
    lost.note("answered", "r")
    assert list(tmp_path.iterdir()) == []


def test_lines_and_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "MAX_LINES", 3)
    monkeypatch.setattr(timings, "_MAX_REQUESTS", 2)
    some = Timings(tmp_path / "file")
    for name in "abcde":
        some.note("asked", name)
    assert [event.request for event in read_events(tmp_path / "file")] == ["a", "b", "c"]
    assert len(some._seen) <= 2


def test_a_half_line_is_left_out_and_other_text_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"what":"asked","at_s":1.5,"request":"r"}\n{"what":"answ')
    assert list(read_events(path)) == [Event(what="asked", at_s=1.5, request="r")]
    path.write_bytes(b'{"what":"danced","at_s":1.5}\n')
    with pytest.raises(InvalidUsage, match="line 1"):
        list(read_events(path))
    monkeypatch.setattr(timings, "MAX_FILE_BYTES", 10)
    with pytest.raises(InvalidUsage, match="larger"):
        list(read_events(path))
    with pytest.raises(InvalidUsage, match="cannot read"):
        list(read_events(tmp_path / "none"))


@pytest.mark.parametrize("has_cuda", [False, True])
def test_a_cpu_has_events_that_have_happened(
    has_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = ModuleType("torch")
    built = SimpleNamespace(is_built=lambda: has_cuda)
    torch.backends = SimpleNamespace(cuda=built)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(Event=object)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    cpu_event.stand_in()
    assert (torch.cuda.Event is object) == has_cuda
    event = cpu_event.PastEvent(enable_timing=True)
    event.record()
    event.wait()
    event.synchronize()
    assert event.query()
