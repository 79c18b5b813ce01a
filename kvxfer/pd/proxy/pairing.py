"""Hosts, ports and counts of a command line, paired to engines as the articles' proxy does.

One host, one port and a count: port + i. One host or one port beside several of the other: it
stands for all. Otherwise as many hosts as ports. (LMCache, ``disagg_proxy_server.py``.)
"""

from collections import Counter
from collections.abc import Sequence

from kvxfer.control.ports import MAX_PORT
from kvxfer.errors import InvalidUsage
from kvxfer.pd.client import require_host
from kvxfer.pd.proxy.options import Channels, EngineAddress

_MAX_ENGINES = 1024


def pair_hosts(option: str, hosts: str, ports: str, count: int) -> tuple[tuple[str, int], ...]:
    """``count`` addresses out of comma-separated hosts and ports.

    Args:
        option: what the options begin with, such as ``--decoder``.

    Raises:
        InvalidUsage: they cannot be read, or their numbers do not fit each other or ``count``.
    """
    if not 1 <= count <= _MAX_ENGINES:
        raise InvalidUsage(f"{option}: {count} engines; use 1 .. {_MAX_ENGINES}")
    names = _hosts(f"{option}-host", hosts)
    numbers = parse_ports(f"{option}-port", ports)
    if len(names) == len(numbers) == 1:
        return tuple((names[0], _in_range(f"{option}-port", numbers[0] + i)) for i in range(count))
    most = max(len(names), len(numbers))
    if {len(names), len(numbers)} - {1, most} or most != count:
        raise InvalidUsage(
            f"{option}: {len(names)} hosts and {len(numbers)} ports for {count} engines; give one "
            f"host and one port, one of them and {count} of the other, or {count} of both"
        )
    if len(names) == 1:
        names *= count
    if len(numbers) == 1:
        numbers *= count
    return tuple(zip(names, numbers, strict=True))


def parse_ports(option: str, text: str) -> tuple[int, ...]:
    """Comma-separated ports.

    Raises:
        InvalidUsage: one is no port.
    """
    ports = []
    for word in _words(option, text):
        if not (word.isascii() and word.isdigit() and len(word) <= 5):
            raise InvalidUsage(f"{option}: {word!r} is not a port; use 1 .. {MAX_PORT}")
        ports.append(_in_range(option, int(word)))
    return tuple(ports)


def prefill_engines(hosts: str, ports: str, count: int) -> tuple[EngineAddress, ...]:
    """The prefill engines of a command line.

    Raises:
        InvalidUsage: as `pair_hosts`.
    """
    pairs = pair_hosts("--prefiller", hosts, ports, count)
    return tuple(EngineAddress("prefill", host, port) for host, port in pairs)


def decode_engines(
    hosts: str, ports: str, count: int, init_ports: str, alloc_ports: str
) -> tuple[EngineAddress, ...]:
    """The decode engines of a command line, with the channels of their ranks.

    ``init_ports`` and ``alloc_ports`` have a port a rank (``7300,7301``). For several engines
    they are those of the first: one on the same host has the next ports in a row, one on a host of
    its own has the same. ``7300,7301;7310,7311`` gives each engine its own.

    Raises:
        InvalidUsage: as `pair_hosts`, another number of init than of alloc ports, another number
            of groups than of engines, or a port that would be used twice on a host.
    """
    pairs = pair_hosts("--decoder", hosts, ports, count)
    inits = _ports_of_engines("--decoder-init-port", init_ports, pairs)
    allocs = _ports_of_engines("--decoder-alloc-port", alloc_ports, pairs)
    engines = []
    for index, ((host, port), init, alloc) in enumerate(zip(pairs, inits, allocs, strict=True)):
        if len(init) != len(alloc):
            raise InvalidUsage(
                f"decoder {index} ({host}:{port}) has {len(init)} init ports and {len(alloc)} "
                "alloc ports; --decoder-init-port and --decoder-alloc-port take one each a TP rank"
            )
        channels = tuple(Channels(host, a, b) for a, b in zip(init, alloc, strict=True))
        engines.append(EngineAddress("decode", host, port, channels))
    return tuple(engines)


def require_distinct(engines: Sequence[EngineAddress]) -> None:
    """Check that no port of a host stands for two things.

    Raises:
        InvalidUsage: one does.
    """
    uses: Counter[tuple[str, int]] = Counter()
    for engine in engines:
        uses[engine.host, engine.port] += 1
        for channel in engine.channels:
            uses[channel.host, channel.init_port] += 1
            uses[channel.host, channel.alloc_port] += 1
    for (host, port), times in uses.items():
        if times > 1:
            raise InvalidUsage(
                f"port {port} of {host} stands for {times} things; give every engine, and every "
                "init and alloc channel of a decoder's ranks, a port of its own"
            )


def _ports_of_engines(
    option: str, text: str, pairs: Sequence[tuple[str, int]]
) -> list[tuple[int, ...]]:
    groups = [parse_ports(option, group) for group in text.split(";")]
    if len(groups) == len(pairs) > 1:
        return groups
    if len(groups) > 1:
        raise InvalidUsage(
            f"{option}: {len(groups)} groups of ports for {len(pairs)} decoders; give one group, "
            "or one a decoder, with ; between them"
        )
    # Engines of a host come one after the other, each with as many ports as it has ranks.
    ports, seen = groups[0], Counter[str]()
    rows = []
    for host, _ in pairs:
        step = seen[host] * len(ports)
        seen[host] += 1
        rows.append(tuple(_in_range(option, port + step) for port in ports))
    return rows


def _hosts(option: str, text: str) -> tuple[str, ...]:
    names = _words(option, text)
    for name in names:
        try:
            require_host(name)
        except InvalidUsage as error:
            raise InvalidUsage(f"{option}: {error}") from error
    return names


def _words(option: str, text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise InvalidUsage(f"{option}: {text!r} has an empty item; write them as a,b,c")
    return words


def _in_range(option: str, port: int) -> int:
    if not 1 <= port <= MAX_PORT:
        raise InvalidUsage(f"{option}: port {port} is out of range; use 1 .. {MAX_PORT}")
    return port
