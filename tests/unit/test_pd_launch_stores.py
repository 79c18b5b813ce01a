"""A store beside an engine: what both are told, what has to be installed, and who starts first."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_ports

from kvxfer.env import child_environment
from kvxfer.errors import InvalidUsage, NotAvailable, PeerLost
from kvxfer.pd.launch import stores
from kvxfer.pd.launch.engines import Program, engine_programs, store_programs
from kvxfer.pd.launch.ports import PortPlan
from kvxfer.pd.launch.python_site import MOONCAKE, PythonSite
from kvxfer.pd.launch.spec import parse_setup
from kvxfer.pd.launch.stack import ProgramState, Stack
from kvxfer.pd.launch.stores import STORES, Held, require_store
from kvxfer.pd.models import ServedModel

MODEL = ServedModel("m", "owner/m")


def site(*packages: str, is_cpu: bool = True) -> PythonSite:
    return PythonSite("/py", is_cpu, has_flashinfer=True, versions=dict.fromkeys(packages, "1"))


def programs(text: str, *, is_cpu: bool = False) -> tuple[list[Program], Program]:
    spec, ports = parse_setup(text), PortPlan()
    (engine,) = engine_programs(spec, MODEL, site(is_cpu=is_cpu), ports)
    return store_programs(spec, site(is_cpu=is_cpu), ports), engine


def option(program: Program, name: str) -> str:
    return program.words[program.words.index(name) + 1]


def transfer(program: Program) -> dict[str, Any]:
    at = program.words.index("--kv-transfer-config")
    found: dict[str, Any] = json.loads(program.words[at + 1])
    return found


def test_without_a_store_nothing_is_told_or_started() -> None:
    assert programs("a=aggregated")[0] == []
    stores, engine = programs("a=aggregated,reuse=none")
    assert stores == []
    assert "--no-enable-prefix-caching" in engine.words
    assert "--kv-transfer-config" not in engine.words
    assert "--no-enable-prefix-caching" not in programs("a=aggregated")[1].words


@pytest.mark.parametrize("is_cpu", [False, True])
def test_mooncake_and_its_engine_name_the_same_ports(
    is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MC_STORE_MEMCPY", raising=False)
    (store,), engine = programs("a=aggregated,reuse=mooncake", is_cpu=is_cpu)
    assert store.words[:3] == ("/py", "-m", "mooncake.cli")
    assert {"--rpc_port=7501", "--metrics_port=7502"} <= set(store.words)
    assert (store.url, store.health) == ("http://127.0.0.1:7502", "/health")
    told = transfer(engine)
    assert told["kv_connector"] == "MooncakeStoreConnector"
    assert told["kv_connector_module_path"] == "kvxfer.connectors.vllm.timed"
    (name,) = engine.files
    assert engine.environment["MOONCAKE_CONFIG_PATH"] == name
    config = json.loads(engine.files[name])
    assert config["master_server_address"] == "127.0.0.1:7501"
    assert config["global_segment_size"] == (1 if is_cpu else 64) << 30
    assert engine.environment["KVXFER_TIMINGS"] == stores.TIMINGS
    assert engine.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert engine.environment["MC_STORE_MEMCPY"] == "0"
    monkeypatch.setenv("MC_STORE_MEMCPY", "1")
    assert programs("a=aggregated,reuse=mooncake")[1].environment["MC_STORE_MEMCPY"] == "1"


def test_lmcache_and_its_engine_name_the_same_port() -> None:
    (store,), engine = programs("a=aggregated,reuse=lmcache")
    assert store.words[1:3] == ("-m", "lmcache.v1.multiprocess.http_server")
    assert [option(store, name) for name in ("--host", "--port")] == ["127.0.0.1", "7501"]
    assert option(store, "--http-port") == "7502"
    assert "--l2-adapter" not in store.words
    assert (store.url, store.health) == ("http://127.0.0.1:7502", "/healthcheck")
    told = transfer(engine)
    assert told["kv_connector"].endswith("lmcache_mp_connector:LMCacheMPConnector")
    assert told["kv_connector_extra_config"]["lmcache.mp.port"] == 7501
    assert engine.files == {}


@pytest.mark.parametrize("is_cpu", [False, True])
def test_the_store_beside_an_engine_moves_its_kv_to_the_far_one(is_cpu: bool) -> None:
    (near, far), engine = programs("a=aggregated,reuse=lmcache-far", is_cpu=is_cpu)
    assert [(one.name, one.url, one.health) for one in (near, far)] == [
        ("store", "http://127.0.0.1:7502", "/healthcheck"),
        ("far-store", "http://127.0.0.1:7505", "/healthcheck"),
    ]
    assert set(near.ports).isdisjoint(far.ports)
    assert option(far, "--port") == "7504"
    assert option(near, "--l2-store-policy") == "skip_l1"
    told = [json.loads(option(one, "--l2-adapter")) for one in (near, far)]
    assert {one["module_path"] for one in told} == {"kvxfer.connectors.lmcache.mp"}
    here, there = (one["adapter_params"] for one in told)
    assert there["page_bytes"] == here["page_bytes"] == (8 if is_cpu else 64) << 20
    assert there["listen"] == "127.0.0.1:7506"
    assert (here["peers"], here["copies"]) == ([there["listen"]], "moved")
    assert transfer(engine)["kv_connector_extra_config"]["lmcache.mp.port"] == 7501


def test_ports_of_a_store_are_nobody_elses() -> None:
    ports = PortPlan()
    spec = parse_setup("a=pd,decode=2,connector=lmcache")
    pair = engine_programs(spec, MODEL, site(is_cpu=False), ports)
    taken = {port for program in pair for port in program.ports}
    assert taken.isdisjoint(ports.store)
    assert ports.notification not in ports.store
    assert ports.side(0) not in ports.store


@pytest.mark.parametrize(
    "text", ["a=pd,reuse=mooncake", "a=aggregated,reuse=redis", "a=aggregated,reuse="]
)
def test_reuse_is_of_one_engine_and_known(text: str) -> None:
    with pytest.raises(InvalidUsage, match="reuse"):
        parse_setup(text)


@pytest.mark.parametrize(
    ("reuse", "packages", "has_verbs", "text"),
    [
        ("mooncake", (), True, "pip install mooncake-transfer-engine-non-cuda"),
        ("lmcache", (MOONCAKE[0],), True, "pip install lmcache"),
        ("lmcache-far", (), True, "reuse=lmcache-far needs LMCache"),
        ("mooncake", (MOONCAKE[2],), False, "apt-get install libibverbs1 libnuma1 libcurl4$"),
        ("lmcache", ("lmcache", MOONCAKE[2]), False, "apt-get install libibverbs1"),
        ("mooncake", (MOONCAKE[1],), True, ""),
        ("lmcache", ("lmcache",), False, ""),
        ("vllm", (), False, ""),
        ("none", (MOONCAKE[0],), False, ""),
    ],
)
def test_what_a_store_needs_is_named(
    reuse: Any,
    packages: tuple[str, ...],
    has_verbs: bool,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "has_library", lambda name: has_verbs)
    if not text:
        require_store(reuse, site(*packages))
        return
    with pytest.raises(NotAvailable, match=text):
        require_store(reuse, site(*packages))


def test_a_gpu_takes_mooncakes_package_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotAvailable, match="mooncake-transfer-engine-cuda13"):
        require_store("mooncake", site(is_cpu=False))
    monkeypatch.setattr(stores, "has_library", lambda name: "mlx5" not in name)
    require_store("mooncake", site(MOONCAKE[2]))
    with pytest.raises(NotAvailable, match="apt-get install ibverbs-providers"):
        require_store("mooncake", site(MOONCAKE[1], is_cpu=False))


def test_what_listens_everywhere_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stores, "has_library", lambda name: True)
    require_store("lmcache", site("lmcache"))
    assert caplog.messages == []
    require_store("mooncake", site(MOONCAKE[2]))
    assert "all addresses" in caplog.text


def test_a_library_is_there_or_not() -> None:
    assert stores.has_library("libc.so.6")
    assert not stores.has_library("libkvxfer-no-such.so.1")


def _puts(**items: int) -> str:
    lines = [f"master_batch_put_{name}_items_total {count}" for name, count in items.items()]
    return "\n".join(["# TYPE a counter", *lines, ""])


def _moving(objects: int) -> str:
    plugin = {"moved_to_peers": 7, "read_from_peers": 5, "found_here": 1}
    return json.dumps(
        {"l1": {"total_object_count": objects, "write_locked_count": 0}, "l2_adapters": [plugin]}
    )


@pytest.mark.parametrize(
    ("reuse", "page", "held"),
    [
        ("mooncake", _puts(start=12, end=12), Held(12, is_busy=False)),
        ("mooncake", _puts(start=14, end=12), Held(12, is_busy=True)),
        ("mooncake", _puts(start=14, start_failed=1, end=12, revoke=1), Held(12, is_busy=False)),
        ("mooncake", _puts(start=12), None),
        ("lmcache", '{"total_object_count":4,"write_locked_count": 0}', Held(4, is_busy=False)),
        ("lmcache", '{"total_object_count":4,"write_locked_count":2}', Held(4, is_busy=True)),
        ("lmcache", "{}", None),
        ("lmcache-far", _moving(objects=0), Held(7, is_busy=False, num_far=5, num_near=1)),
        ("lmcache-far", _moving(objects=2), Held(7, is_busy=True, num_far=5, num_near=1)),
        ("lmcache-far", '{"total_object_count":4,"write_locked_count":2}', None),
    ],
)
def test_how_much_a_store_holds(reuse: str, page: str, held: Held | None) -> None:
    assert STORES[reuse].held(page) == held


# A store that starts before its engine.

_SERVER = """
import http.server, pathlib, sys
port, path, needed = int(sys.argv[1]), sys.argv[2], sys.argv[3]
assert not needed or pathlib.Path(needed).read_text() == "config", "the file is missing"
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == path else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server(name: str, port: int, health: str, needed: str = "") -> Program:
    return Program(
        name=name,
        role="both" if name == "engine" else None,
        url=f"http://127.0.0.1:{port}",
        words=(sys.executable, "-c", _SERVER, str(port), health, needed),
        environment=child_environment({}),
        ports=(port,),
        files={needed: "config"} if needed else {},
        health=health,
    )


def test_the_engine_waits_for_its_stores_and_finds_its_file(tmp_path: Path) -> None:
    first, second, third = free_ports(3)
    engine = server("engine", first, "/health", needed="some.json")
    store, far = server("store", second, "/healthcheck"), server("far", third, "/healthcheck")
    seen: list[dict[str, str]] = []

    def watch(states: Any) -> None:
        seen.append(
            {state.name: state.state for state in states if isinstance(state, ProgramState)}
        )

    with Stack([engine], None, tmp_path, host="127.0.0.1", stores=(store, far)) as stack:
        stack.wait_up(30.0, watch)
        assert stack.url == engine.url
        assert stack.store is store
        assert stack.folder == tmp_path
        assert stack.token_budget() is None
    assert seen[-1] == {"store": "up", "far": "up", "engine": "up"}
    assert {"store": "up", "far": "up", "engine": "waiting"} in seen
    early = [one for one in seen if {one["store"], one["far"]} != {"up"}]
    assert {one["engine"] for one in early} == {"waiting"}


def test_a_store_that_ends_is_told_of(tmp_path: Path) -> None:
    first, second = free_ports(2)
    broken = replace(server("store", second, "/health", needed="some.json"), files={})
    engine = server("engine", first, "/health")
    with (
        Stack([engine], None, tmp_path, host="127.0.0.1", stores=[broken]) as stack,
        pytest.raises(PeerLost, match=r"store ended(?s:.*)some\.json"),
    ):
        stack.wait_up(30.0)
