"""What a set-up may be, how it is read, and which ports and devices it gets."""

import pytest

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.pd.launch.placement import cpu_environments, gpu_environments
from kvxfer.pd.launch.ports import PortPlan, require_free
from kvxfer.pd.launch.spec import SetupSpec, parse_setup


def test_a_line_says_a_whole_set_up() -> None:
    found = parse_setup(
        "a=pd,prefill=2,decode=1,prefill-tp=1,decode-tp=2,connector=nixl,devices=3+2+1+0",
        {"prefill_args": ("-p",), "decode_args": ("-d",)},
    )
    assert found == SetupSpec(
        name="a",
        kind="pd",
        connector="nixl",
        num_prefill=2,
        num_decode=1,
        prefill_tp=1,
        decode_tp=2,
        devices=(3, 2, 1, 0),
        prefill_args=("-p",),
        decode_args=("-d",),
    )


def test_defaults_of_each_kind() -> None:
    assert parse_setup("a=pd") == SetupSpec(name="a", kind="pd", connector="kvxfer", num_decode=1)
    one = parse_setup("b=aggregated,tp=4", {"prefill_args": ("-p",), "decode_args": ("-d",)})
    assert (one.prefill_tp, one.num_devices, one.connector) == (4, 4, "none")
    assert (one.prefill_args, one.decode_args) == (("-p",), ())  # there is no decode engine
    assert parse_setup("c=prefill_only").num_devices == 1
    assert parse_setup("d=external,url=http://h:1/").url == "http://h:1"


@pytest.mark.parametrize(
    "text",
    ["", "pd", "a=none", "a=pd,prefill=x", "a=pd,prefill=0", "a=pd,decode=0", "a=pd,tp=2",
     "a=pd,connector=none", "a=pd,connector=x", "a=aggregated,prefill=2", "a=aggregated,tp=0",
     "a=aggregated,connector=nixl", "a=pd,devices=0", "a=pd,devices=0+x", "a=pd,devices=0+9999",
     "a=external", "a=pd,", "a=pd,x=1", "=pd", "../a=pd", "a b=pd", "a/b=aggregated",
     "-a=external,url=http://h:1", f"{'a' * 101}=pd"],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidUsage, match=r"a: |set-up"):
        parse_setup(text)


@pytest.mark.parametrize(
    "url", ["https://h", "http://", "h:1", "http://h:99999", "http://h:abc", "http://[::1", ""]
)
def test_a_server_that_runs_already_needs_an_address(url: str) -> None:
    with pytest.raises(InvalidUsage, match="is no http://HOST:PORT"):
        parse_setup(f"a=external,url={url}")


def test_no_two_purposes_share_a_port() -> None:
    ports = PortPlan(7100)
    assert (ports.prefill(0), ports.decode(0), ports.notification) == (7100, 7200, 7500)
    assert (ports.init(0, 2), ports.alloc(0, 2)) == ((7300, 7301), (7400, 7401))
    taken = [ports.prefill(i) for i in range(4)] + [ports.decode(i) for i in range(4)]
    taken += [port for i in range(4) for port in (*ports.init(i, 8), *ports.alloc(i, 8))]
    taken += [ports.side(i) for i in range(8)] + [ports.notification]
    assert len(set(taken)) == len(taken)


def test_ports_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="engine ports from 65000"):
        PortPlan(65000)
    with pytest.raises(InvalidUsage, match="100"):
        PortPlan(7100).init(12, 8)


def test_a_port_in_use_is_seen() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NotAvailable, match=str(port)):
            require_free("127.0.0.1", [port])
    require_free("127.0.0.1", [port])


def test_each_engine_sees_its_own_gpus_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = list(gpu_environments([2, 1], ()))
    assert found == [
        (["0", "1"], {"CUDA_VISIBLE_DEVICES": "0,1,2"}),
        (["2"], {"CUDA_VISIBLE_DEVICES": "2,0,1"}),
    ]


def test_devices_count_within_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-b,6")
    assert [names for names, _ in gpu_environments([1, 1], (2, 1))] == [["6"], ["GPU-b"]]
    with pytest.raises(InvalidUsage, match="device 3"):
        list(gpu_environments([1], (3,)))


def test_each_rank_has_cores_of_its_own() -> None:
    found = [bound["VLLM_CPU_OMP_THREADS_BIND"] for _, bound in cpu_environments([2, 1], range(7))]
    assert found == ["0,1|2,3", "4,5,6"]
    with pytest.raises(InvalidUsage, match="3 ranks on 2 cores"):
        list(cpu_environments([2, 1], [0, 1]))
