"""Where decode workers are, and what they say of themselves."""

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.control import ControlClient, SharedKey
from kvxfer.control.addresses import is_loopback, parse_url
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.layout import KVLayout, ToFp8
from kvxfer.layout.conversion import DESTINATION, SOURCES
from kvxfer.memory import MemoryKind
from kvxfer.worker.decode import CHANNEL
from kvxfer.worker.messages import AskWorker, WorkerInfo
from kvxfer.worker.options import LOOPBACK_HOST

_MEET_S = 10.0
_MAX_FILE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Receivers:
    """The ranks of a receiver.

    Attributes:
        addresses: the channels of each.
        infos: what those say that have a ``worker`` channel.
    """

    addresses: tuple[dict[str, str], ...]
    infos: tuple[WorkerInfo, ...]

    def transport_for(self, asked: str) -> str:
        """The transport to them: the one that they serve, where they say so and do not leave it.

        Raises:
            NotAvailable: another one is asked for.
        """
        served = sorted({info.transport for info in self.infos})
        if not served or served == ["auto"]:
            return asked
        if len(served) > 1 or asked not in ("auto", served[0]):
            raise NotAvailable(
                f"--transport {asked}, and the receivers serve {', '.join(served)}; start them "
                "with one and the same"
            )
        return served[0]

    @property
    def memory(self) -> MemoryKind | None:
        """Where their caches lie; None where they do not say, or differ."""
        kinds = {info.memory for info in self.infos}
        return next((kind for kind in MemoryKind if kinds == {kind.value}), None)

    def conversion_of(self, layout: KVLayout) -> ToFp8 | None:
        """The conversion that the two dtypes ask for, if a copy can do it."""
        theirs = {info.layout.dtype for info in self.infos}
        return ToFp8() if theirs == {DESTINATION} and layout.dtype in SOURCES else None


def read_addresses(text: str, key: SharedKey | None) -> dict[str, str]:
    """The channels of a worker by name: out of JSON, a file of it, or asked of HOST:PORT.

    Raises:
        InvalidUsage: none of the three.
        KvxferError: nobody answers at HOST:PORT.
    """
    if text.lstrip().startswith("{"):
        return _parse(text, "--to")
    path = Path(text)
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            return _parse(file.readline(_MAX_FILE_BYTES), text)
    try:
        parse_url(text)
    except InvalidUsage as error:
        raise InvalidUsage(
            f"--to: {text[:200]!r} is neither the line that kvxfer serve prints, nor a file that "
            f"begins with it, nor HOST:PORT ({error})"
        ) from None
    return dict(_ask(text, key).addresses)


def meet_receivers(found: Sequence[dict[str, str]], key: SharedKey | None) -> Receivers:
    """Ask the workers at these addresses what they are.

    Raises:
        InvalidUsage: they are ranks of fewer or more than their layout has.
        KvxferError: one does not answer.
    """
    infos = tuple(_ask(one[CHANNEL], key) for one in found if CHANNEL in one)
    for info in infos:
        num_ranks = info.tp_size * info.pp_size
        if num_ranks != len(found):
            raise InvalidUsage(
                f"--to names {len(found)} ranks of a receiver that has {num_ranks}; give it once "
                "for each"
            )
    return Receivers(tuple(found), infos)


def local_host_to(address: str) -> str:
    """The numeric address of this host on the network that leads to ``address``.

    Raises:
        InvalidUsage: a malformed address.
        NotAvailable: no network leads there.
    """
    at = parse_url(address)
    if is_loopback(at.ip):
        return LOOPBACK_HOST if at.ip.version == 4 else "::1"
    family = socket.AF_INET6 if at.is_ipv6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(at.ip), at.port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NotAvailable(
            f"no network leads to {address}: {error.strerror}; check it, or give --bind"
        ) from error


def _ask(address: str, key: SharedKey | None) -> WorkerInfo:
    with ControlClient(address, WorkerInfo, deadline_s=_MEET_S, key=key) as client:
        return client.call(AskWorker())


def _parse(text: str, where: str) -> dict[str, str]:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{where}: this is no JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise InvalidUsage(f"{where}: the addresses of a worker are an object of strings")
    missing = {"init", "alloc"} - set(found)
    if missing:
        raise InvalidUsage(f"{where}: it lacks {', '.join(sorted(missing))}; pass all of the line")
    return found
