"""Hosts, ports and counts of a command line, as the articles' proxy pairs them."""

import argparse
from typing import Any

import pytest

from kvxfer.cli.pd import proxy as command
from kvxfer.errors import InvalidUsage
from kvxfer.pd.proxy.options import Channels, ProxyOptions
from kvxfer.pd.proxy.pairing import decode_engines, pair_hosts, require_distinct


def parsed(*arguments: str) -> ProxyOptions:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.parse_options(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("hosts", "ports", "count", "pairs"),
    [
        ("a", "7100", 1, [("a", 7100)]),
        ("a", "7100", 3, [("a", 7100), ("a", 7101), ("a", 7102)]),
        ("a", "1,5", 2, [("a", 1), ("a", 5)]),
        ("a,b", "7", 2, [("a", 7), ("b", 7)]),
        ("a, b", "7 ,9", 2, [("a", 7), ("b", 9)]),
        ("::1", "7", 1, [("::1", 7)]),
        ("My_Host.example", "7", 1, [("My_Host.example", 7)]),
        ("bücher.example", "7", 1, [("bücher.example", 7)]),
    ],
)
def test_hosts_and_ports_are_paired(
    hosts: str, ports: str, count: int, pairs: list[tuple[str, int]]
) -> None:
    assert list(pair_hosts("--decoder", hosts, ports, count)) == pairs


@pytest.mark.parametrize(
    ("hosts", "ports", "count", "complaint"),
    [
        ("a,b", "1", 3, "2 hosts and 1 ports for 3 engines"),
        ("a,b", "1,2,3", 3, "2 hosts and 3 ports for 3 engines"),
        ("a,b", "1,2", 1, "for 1 engines"),
        ("a,b,c", "1,2", 2, "3 hosts and 2 ports"),
        ("a", "65535", 2, "port 65536 is out of range"),
        ("a", "0", 1, "port 0 is out of range"),
        ("a", "x", 1, "'x' is not a port"),
        ("a", "1,,2", 2, "empty item"),
        ("", "1", 1, "empty item"),
        ("a", "1", 0, "0 engines"),
        ("a", "１", 1, "is not a port"),
        ("a..b", "1", 1, "host: 'a..b' is no host"),
        ("a," + "b" * 64, "1", 2, "is no host"),
        ("[::1]", "1", 1, r"'\[::1\]' is no host"),
        ("127.0.0.1:80", "1", 1, "'127.0.0.1:80' is no host"),
        ("http://a", "1", 1, "is no host"),
        ("a/b", "1", 1, "is no host"),
        ("a@b", "1", 1, "is no host"),
    ],
)
def test_what_does_not_fit_is_refused(hosts: str, ports: str, count: int, complaint: str) -> None:
    with pytest.raises(InvalidUsage, match=complaint) as error:
        pair_hosts("--decoder", hosts, ports, count)
    assert "--decoder" in str(error.value)


def ports_of(**changes: Any) -> list[list[tuple[str, int, int]]]:
    told = {"hosts": "a", "ports": "7200", "count": 1, "init_ports": "7300", "alloc_ports": "7400"}
    engines = decode_engines(**{**told, **changes})
    require_distinct(engines)
    return [[(it.host, it.init_port, it.alloc_port) for it in e.channels] for e in engines]


def test_each_rank_of_a_decoder_has_its_ports() -> None:
    assert ports_of() == [[("a", 7300, 7400)]]
    assert ports_of(init_ports="7300,7301", alloc_ports="7400,7401") == [
        [("a", 7300, 7400), ("a", 7301, 7401)]
    ]


def test_decoders_of_one_host_have_ports_one_after_the_other() -> None:
    assert ports_of(count=2, init_ports="7300,7301", alloc_ports="7400,7401") == [
        [("a", 7300, 7400), ("a", 7301, 7401)],
        [("a", 7302, 7402), ("a", 7303, 7403)],
    ]
    assert ports_of(count=2, ports="7200,7290")[1] == [("a", 7301, 7401)]


def test_decoders_of_several_hosts_have_the_same_ports() -> None:
    assert ports_of(count=3, hosts="a,b,a", ports="1,2,3") == [
        [("a", 7300, 7400)],
        [("b", 7300, 7400)],
        [("a", 7301, 7401)],
    ]


def test_each_decoder_may_have_ports_of_its_own() -> None:
    assert ports_of(count=2, init_ports="1,2;30", alloc_ports="3,4;40") == [
        [("a", 1, 3), ("a", 2, 4)],
        [("a", 30, 40)],
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"init_ports": "1,2"}, "has 2 init ports and 1 alloc ports"),
        (
            {"count": 2, "init_ports": "1,2;3", "alloc_ports": "4,5"},
            "1 init ports and 2",
        ),
        ({"count": 3, "init_ports": "1;2"}, "2 groups of ports for 3 decoders"),
        ({"init_ports": "1;2"}, "2 groups of ports for 1 decoders"),
        ({"init_ports": "7400"}, "port 7400 of a stands for 2 things"),
        ({"count": 2, "init_ports": "7300", "alloc_ports": "7301"}, "port 7301 of a"),
        ({"alloc_ports": "7200"}, "port 7200 of a"),
        ({"init_ports": "65535", "count": 2}, "port 65536 is out of range"),
    ],
)
def test_wrong_channels_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidUsage, match=complaint):
        ports_of(**changes)


def test_the_articles_command_line_is_understood() -> None:
    words = (
        "--host localhost --port 9100 --prefiller-host localhost --prefiller-port 7100 "
        "--num-prefillers 1 --decoder-host localhost --decoder-port 7200 "
        "--decoder-init-port 7300,7301 --decoder-alloc-port 7400,7401 --num-decoders 1 "
        "--proxy-host localhost --proxy-port 7500 --connector lmcache"
    )
    options = parsed(*words.split())
    prefill, decode = options.engines
    assert (options.host, options.port, options.notice_port) == ("localhost", 9100, 7500)
    assert (prefill.role, prefill.port) == ("prefill", 7100)
    assert decode.channels == (
        Channels("localhost", 7300, 7400),
        Channels("localhost", 7301, 7401),
    )


def test_the_defaults_are_the_articles_ports() -> None:
    options = parsed()
    assert [(it.role, it.port) for it in options.engines] == [("prefill", 7100), ("decode", 7200)]
    assert options.engines[1].channels == (Channels("127.0.0.1", 7300, 7400),)
    assert (options.host, options.port, options.connector) == ("127.0.0.1", 9100, "kvxfer")
    assert (options.notice_port, options.routing) == (7500, "least-tokens")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--port", "70000"], "--port"),
        (["--num-prefillers", "0"], "--num-prefillers"),
        (["--max-body", "lots"], "'lots' is not a size"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--connect-timeout", "nan"], "--connect-timeout"),
        (["--connect-timeout", "1_0"], "--connect-timeout"),
        (["--api-key", "@/nowhere/key"], "--api-key: cannot read"),
    ],
)
def test_a_wrong_option_is_refused_by_name(arguments: list[str], complaint: str) -> None:
    with pytest.raises(InvalidUsage, match=complaint):
        parsed(*arguments)


def test_a_key_may_come_from_a_file_and_is_not_shown(tmp_path: Any) -> None:
    path = tmp_path / "key"
    path.write_text("secret\n")
    options = parsed("--api-key", f"@{path}")
    assert options.api_key == "secret"
    assert "secret" not in repr(options)
    path.write_text("two\nlines\n")
    with pytest.raises(InvalidUsage, match="holds no key"):
        parsed("--api-key", f"@{path}")
