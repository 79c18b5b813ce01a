"""From a set-up to the programs of its engines and of its proxy."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvxfer.env import child_environment
from kvxfer.pd.launch.connectors import Endpoint, Role, Wiring, wire
from kvxfer.pd.launch.placement import cpu_environments, gpu_environments
from kvxfer.pd.launch.ports import LOOPBACK, PortPlan
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.launch.stores import STORES, wire_reuse
from kvxfer.pd.models import ServedModel

_SERVER: Final = "vllm.entrypoints.openai.api_server"
_CPU_CACHE_GIB: Final = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that serves HTTP.

    Attributes:
        name: ``prefill0``, ``decode1``, ``engine``, ``store``, ``far-store``, ``proxy``.
        role: what it does; None for what is no engine.
        url: where it answers.
        words: its command line.
        environment: all of its variables.
        ports: all that it binds.
        devices: names of its GPUs or core sets.
        files: texts that it reads in the folder where it stands, by name.
        health: the path that answers once it serves.
    """

    name: str
    role: Role | None
    url: str
    words: tuple[str, ...]
    environment: dict[str, str]
    ports: tuple[int, ...]
    devices: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"


def engine_programs(
    spec: SetupSpec, model: ServedModel, site: PythonSite, ports: PortPlan
) -> list[Program]:
    """The engines of a set-up, prefill engines first.

    Raises:
        InvalidUsage: more ranks than cores or ports, or devices that are not visible.
    """
    roles: list[tuple[Role, int]] = [("both", 0)]
    if spec.kind == "pd":
        roles = [("prefill", index) for index in range(spec.num_prefill)]
        roles += [("decode", index) for index in range(spec.num_decode)]
    ranks = [spec.decode_tp if role == "decode" else spec.prefill_tp for role, _ in roles]
    placed = (
        cpu_environments(ranks, sorted(os.sched_getaffinity(0)))
        if site.is_cpu
        else gpu_environments(ranks, spec.devices)
    )
    programs = []
    for number, ((role, index), (devices, bound)) in enumerate(zip(roles, placed, strict=True)):
        is_decode = role == "decode"
        endpoint = Endpoint(
            role=role,
            is_cpu=site.is_cpu,
            num_cores=devices[0].count(",") + 1 if site.is_cpu else 0,
            init_ports=ports.init(index, spec.decode_tp) if is_decode else (),
            alloc_ports=ports.alloc(index, spec.decode_tp) if is_decode else (),
            notification_port=ports.notification,
            side_port=ports.side(number),
        )
        wiring = _wiring(spec, endpoint, ports)
        port = ports.decode(index) if is_decode else ports.prefill(index)
        words = _server_words(site, model, port, ranks[number])
        own = spec.decode_args if is_decode else spec.prefill_args
        side = (endpoint.side_port,) if spec.connector == "nixl" else ()
        programs.append(
            Program(
                name="engine" if role == "both" else f"{role}{index}",
                role=role,
                url=f"http://{LOOPBACK}:{port}",
                words=(*words, *wiring.words, *own),
                environment=_environment(site, model, bound, wiring),
                files=wiring.files,
                ports=(port, *endpoint.init_ports, *endpoint.alloc_ports, *side),
                devices=tuple(devices),
            )
        )
    return programs


def store_programs(spec: SetupSpec, site: PythonSite, ports: PortPlan) -> list[Program]:
    """The store beside the engine, and the one that it reads from; empty where there is none."""
    store, at = STORES.get(spec.reuse), ports.store
    if store is None:
        return []
    programs = [("store", store.words, at.near, at.http)]
    if store.far_words is not None:
        programs.append(("far-store", store.far_words, at.far, at.far_http))
    return [
        Program(
            name=name,
            role=None,
            url=f"http://{LOOPBACK}:{http}",
            words=(site.python, *words(at, site.is_cpu)),
            environment=child_environment(store.environment),
            ports=bound,
            health=store.health,
        )
        for name, words, bound, http in programs
    ]


def proxy_program(spec: SetupSpec, ports: PortPlan, host: str, port: int) -> Program:
    """The proxy before the engines of a ``pd`` set-up."""
    prefills = [ports.prefill(index) for index in range(spec.num_prefill)]
    decodes = [ports.decode(index) for index in range(spec.num_decode)]
    init = [ports.init(index, spec.decode_tp) for index in range(spec.num_decode)]
    alloc = [ports.alloc(index, spec.decode_tp) for index in range(spec.num_decode)]
    options = {
        "connector": spec.connector,
        "host": host,
        "port": str(port),
        "prefiller-host": LOOPBACK,
        "prefiller-port": _joined(prefills),
        "num-prefillers": str(spec.num_prefill),
        "decoder-host": LOOPBACK,
        "decoder-port": _joined(decodes),
        "decoder-init-port": ";".join(map(_joined, init)),
        "decoder-alloc-port": ";".join(map(_joined, alloc)),
        "num-decoders": str(spec.num_decode),
        "proxy-host": LOOPBACK,
        "proxy-port": str(ports.notification),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    notified = (ports.notification,) if spec.connector.startswith("lmcache") else ()
    return Program(
        name="proxy",
        role=None,
        url=f"http://{LOOPBACK if host in ('0.0.0.0', '::') else host}:{port}",
        words=(sys.executable, "-m", "kvxfer", "pd", "proxy", *words),
        environment=child_environment({}),
        ports=(port, *notified),
    )


def _server_words(site: PythonSite, model: ServedModel, port: int, tp_size: int) -> tuple[str, ...]:
    words = {
        "--host": LOOPBACK,
        "--port": str(port),
        "--model": model.source,
        "--served-model-name": model.name,
        "--tensor-parallel-size": str(tp_size),
    }
    pairs = (word for pair in words.items() for word in pair)
    return (site.python, "-m", _SERVER, *pairs, "--disable-uvicorn-access-log", *model.engine_args)


def _wiring(spec: SetupSpec, endpoint: Endpoint, ports: PortPlan) -> Wiring:
    if spec.kind == "pd":
        return wire(spec.connector, endpoint)
    return wire_reuse(spec.reuse, ports.store, is_cpu=endpoint.is_cpu)


def _environment(
    site: PythonSite, model: ServedModel, bound: Mapping[str, str], wiring: Wiring
) -> dict[str, str]:
    hub = {"HF_HUB_OFFLINE": "1"} if model.is_local else {}
    fixed = {**bound, **wiring.environment, **hub}
    defaults = {"VLLM_NO_USAGE_STATS": "1", **wiring.defaults}
    if site.is_cpu:
        defaults["VLLM_CPU_KVCACHE_SPACE"] = _CPU_CACHE_GIB
    elif not site.has_flashinfer:
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return child_environment(fixed, defaults)


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
