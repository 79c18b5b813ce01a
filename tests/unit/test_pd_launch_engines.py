"""The command lines and variables of engines and proxy."""

import json
from importlib.util import find_spec
from typing import Any

import pytest
from tuning_profiles import profile_of

from kvxfer.connectors.lmcache.options import read_options
from kvxfer.connectors.vllm.config import read_config
from kvxfer.pd.launch.engines import Program, engine_programs, proxy_program
from kvxfer.pd.launch.ports import PortPlan
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.launch.spec import parse_setup
from kvxfer.pd.models import ServedModel
from kvxfer.transport import tuned
from kvxfer.tuning import Section

GPU = PythonSite("/py", is_cpu=False, has_flashinfer=False, versions={})
CPU = PythonSite("/py", is_cpu=True, has_flashinfer=False, versions={})
MODEL = ServedModel("m", "owner/m", ("--load-format", "dummy"))


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


def programs(text: str, site: PythonSite = GPU, model: ServedModel = MODEL) -> list[Program]:
    common = {"prefill_args": ("--p",), "decode_args": ("--d",)}
    return engine_programs(parse_setup(text, common), model, site, PortPlan())


def option(program: Program, name: str) -> str:
    assert program.words.count(name) == 1
    return program.words[program.words.index(name) + 1]


def transfer(program: Program) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(option(program, "--kv-transfer-config"))
    return found


def test_engines_of_kvxfer_and_what_their_connector_reads() -> None:
    prefill, decode = programs("a=pd,decode-tp=2")
    assert prefill.words[:3] == ("/py", "-m", "vllm.entrypoints.openai.api_server")
    assert (prefill.name, prefill.url) == ("prefill0", "http://127.0.0.1:7100")
    assert (decode.name, decode.url) == ("decode0", "http://127.0.0.1:7200")
    assert option(decode, "--tensor-parallel-size") == "2"
    assert option(decode, "--served-model-name") == "m"
    assert option(decode, "--load-format") == "dummy"
    assert ("--p" in prefill.words, "--d" in prefill.words) == (True, False)
    assert ("--p" in decode.words, "--d" in decode.words) == (False, True)
    assert decode.environment["CUDA_VISIBLE_DEVICES"] == "1,2,0"
    assert decode.ports == (7200, 7300, 7301, 7400, 7401)
    for program, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        found = transfer(program)
        assert (found["kv_connector"], found["kv_role"]) == ("KvxferConnector", role)
        extra = read_config(found["kv_connector_extra_config"], is_consumer=role == "kv_consumer")
        assert extra.receives == (role == "kv_consumer")


def test_copies_on_a_cpu_have_the_threads_of_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    for program, cores in zip(programs("a=pd,decode-tp=2", CPU), ("0,1", "2,3|4,5"), strict=True):
        assert program.environment["VLLM_CPU_OMP_THREADS_BIND"] == cores
        assert transfer(program)["kv_connector_extra_config"]["num_threads"] == 2
    assert "num_threads" not in transfer(programs("a=pd")[0])["kv_connector_extra_config"]


def test_a_tuning_profile_has_fewer_threads_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for num_threads, used in ((1, 1), (64, 4)):
        section = Section(transport="shm", memory="private", num_threads=num_threads)
        with tuned.using(profile_of(section)):
            (first, _) = programs("a=pd", CPU)
        assert transfer(first)["kv_connector_extra_config"]["num_threads"] == used


def test_two_decode_engines_share_no_channel() -> None:
    ports = [port for program in programs("a=pd,decode=2,decode-tp=2") for port in program.ports]
    assert len(set(ports)) == len(ports)


def test_engines_of_nixl_have_a_side_channel_each() -> None:
    prefill, decode = programs("a=pd,connector=nixl")
    sides = [one.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for one in (prefill, decode)]
    assert sides == ["7600", "7610"]
    assert transfer(prefill) == {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    assert transfer(programs("a=pd,connector=nixl", CPU)[0])["kv_buffer_device"] == "cpu"


def test_engines_of_lmcache_have_their_roles() -> None:
    engines = programs("a=pd,connector=lmcache,decode-tp=2")
    own = [transfer(one)["kv_connector_extra_config"] for one in engines]
    assert [one.get("skip_last_n_tokens") for one in own] == [None, 1]
    prefill, decode = (one.environment for one in engines)
    assert (prefill["LMCACHE_PD_ROLE"], decode["LMCACHE_PD_ROLE"]) == ("sender", "receiver")
    assert prefill["LMCACHE_PD_PROXY_PORT"] == "7500"
    assert decode["LMCACHE_PD_PEER_INIT_PORT"] == "7300,7301"
    assert prefill["PYTHONHASHSEED"] == decode["PYTHONHASHSEED"] == "0"


def test_engines_of_lmcache_whose_legs_go_together_have_kvxfer_s_class() -> None:
    engines = programs("a=pd,connector=lmcache-together")
    for engine, stock in zip(engines, programs("a=pd,connector=lmcache"), strict=True):
        told, other = transfer(engine), transfer(stock)
        assert told.pop("kv_connector") == "KvxferLMCacheConnector"
        assert find_spec(told.pop("kv_connector_module_path")) is not None
        assert told == {name: it for name, it in other.items() if name != "kv_connector"}
        own = json.loads(engine.environment["LMCACHE_EXTRA_CONFIG"])
        assert read_options(own).peers == "kvxfer"
    program = proxy_program(
        parse_setup("a=pd,connector=lmcache-together"), PortPlan(), "127.0.0.1", 9100
    )
    assert program.ports == (9100, 7500)  # where notices go


def test_one_engine_has_no_connector() -> None:
    (engine,) = programs("a=aggregated,tp=2")
    assert engine.role == "both"
    assert "--kv-transfer-config" not in engine.words
    assert engine.devices == ("0", "1")


def test_variables_that_users_set_win_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert programs("a=aggregated")[0].environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "HF_HUB_OFFLINE" not in programs("a=aggregated")[0].environment
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    assert programs("a=aggregated")[0].environment["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    has_it = PythonSite("/py", is_cpu=False, has_flashinfer=True, versions={})
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in programs("a=aggregated", has_it)[0].environment


def test_a_folder_needs_no_hub(tmp_path: Any) -> None:
    (engine,) = programs("a=aggregated", model=ServedModel("m", str(tmp_path)))
    assert engine.environment["HF_HUB_OFFLINE"] == "1"


def test_the_proxy_is_told_of_every_engine_and_channel() -> None:
    from argparse import ArgumentParser

    from kvxfer.cli.pd import proxy as cli
    from kvxfer.pd.proxy.pairing import decode_engines, prefill_engines

    spec = parse_setup("a=pd,prefill=2,decode=2,decode-tp=2,connector=lmcache")
    program = proxy_program(spec, PortPlan(), "127.0.0.1", 9100)
    assert program.ports == (9100, 7500)
    parser = ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(list(program.words[program.words.index("proxy") + 1 :]))
    engines = engine_programs(spec, MODEL, GPU, PortPlan())
    prefills = prefill_engines(args.prefiller_host, args.prefiller_port, int(args.num_prefillers))
    decodes = decode_engines(
        args.decoder_host,
        args.decoder_port,
        int(args.num_decoders),
        args.decoder_init_port,
        args.decoder_alloc_port,
    )
    told = [
        (one.port, *(c.init_port for c in one.channels), *(c.alloc_port for c in one.channels))
        for one in (*prefills, *decodes)
    ]
    assert told == [one.ports for one in engines]
    assert args.connector == "lmcache"
