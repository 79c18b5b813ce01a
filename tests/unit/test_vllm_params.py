"""What clients may say of a hand-over, and the settings of the connector."""

from typing import Any

import pytest
from vllm_fakes import receive_params, send_params

from kvxfer.connectors.vllm.config import read_config
from kvxfer.connectors.vllm.params import (
    MAX_ID_CHARS,
    ReceiveParams,
    SendParams,
    attempt_id,
    read_params,
    split_attempt,
)
from kvxfer.control.messages import ReserveRequest
from kvxfer.errors import InvalidUsage


def test_both_legs_are_read() -> None:
    sent = read_params(send_params("t", {"init": "tcp://h:1", "alloc": "tcp://h:2"}))
    assert isinstance(sent, SendParams)
    assert (sent.transfer_id, sent.receivers[0].alloc) == ("t", "tcp://h:2")
    assert read_params(receive_params("t")) == ReceiveParams("t")


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, "kvxfer"])
def test_requests_of_others_are_none_of_ours(params: object) -> None:
    assert read_params(params) is None


@pytest.mark.parametrize(
    "ours",
    [
        None,
        [],
        {"role": "receive"},
        {"role": "both", "transfer_id": "t"},
        {"role": "receive", "transfer_id": ""},
        {"role": "receive", "transfer_id": "x" * (MAX_ID_CHARS + 1)},
        {"role": "receive", "transfer_id": "with~tilde"},
        {"role": "receive", "transfer_id": "line\n"},
        {"role": "receive", "transfer_id": 7},
        {"role": "send", "transfer_id": "t"},
        {"role": "send", "transfer_id": "t", "receivers": []},
        {"role": "send", "transfer_id": "t", "receivers": [{"init": "tcp://h:1"}]},
        {"role": "send", "transfer_id": "t", "receivers": [{"init": "a" * 301, "alloc": "b"}]},
        {"role": "send", "transfer_id": "t", "receivers": [{"init": "a", "alloc": "b"}] * 1025},
    ],
)
def test_what_is_malformed_is_refused(ours: object) -> None:
    with pytest.raises(InvalidUsage, match="kv_transfer_params"):
        read_params({"kvxfer": ours})


def test_an_attempt_is_told_from_its_transfer() -> None:
    assert split_attempt(attempt_id("t-1", 2, "cpu-vec")) == ("t-1", 2, "cpu-vec")


@pytest.mark.parametrize("name", ["plain", "a~b", "a~b~c~", "a~-1~plain", "a~²~plain", "~~~"])
def test_an_id_that_is_no_attempt_has_number_0(name: str) -> None:
    assert split_attempt(name)[1] == 0


def test_the_longest_attempt_fits_the_protocol() -> None:
    name = attempt_id("x" * MAX_ID_CHARS, 999_999_999, "cpu-neonhelium")
    assert len(name) <= _max_chars(ReserveRequest)


def _max_chars(kind: Any) -> int:
    return int(kind.__annotations__["request_id"].__metadata__[0].max_length)


def test_settings_have_defaults_that_stay_on_this_host() -> None:
    config = read_config({}, is_consumer=False)
    assert (config.transport, config.bind_host, config.insecure) == ("auto", "127.0.0.1", False)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"init_port": [1]}, "init_port"),
        ({"transport": 7}, "transport"),
        ({"receive_timeout_s": 0}, "receive_timeout_s"),
        ({"send_timeout_s": float("nan")}, "send_timeout_s"),
        ({"on_failure": "retry"}, "on_failure"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_a_setting_that_is_wrong_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidUsage, match=named):
        read_config(extra, is_consumer=False)


def test_an_engine_that_receives_needs_ports() -> None:
    with pytest.raises(InvalidUsage, match="init_ports"):
        read_config({}, is_consumer=True)


def test_there_is_one_port_of_each_for_every_rank() -> None:
    config = read_config(
        {"init_ports": [7300, 7301], "alloc_ports": [7400, 7401]}, is_consumer=True
    )
    assert config.ports(2).for_rank(1) == {"init": 7301, "alloc": 7401}
    with pytest.raises(InvalidUsage, match="list 2 ranks, this engine has 1"):
        config.ports(1)


def test_layers_are_sent_one_by_one_where_nothing_is_received() -> None:
    ports = {"init_ports": [7300], "alloc_ports": [7400]}
    assert read_config({}, is_consumer=False).sends_layerwise
    assert not read_config(ports, is_consumer=True).sends_layerwise
    assert read_config({**ports, "layerwise": True}, is_consumer=True).sends_layerwise
