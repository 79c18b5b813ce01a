"""The options of ``kvxfer sweep`` that put its two sides on two hosts: --listen and --peer."""

import argparse

from kvxfer.cli.option_words import option_words
from kvxfer.cli.output import write
from kvxfer.cli.parent import Parent
from kvxfer.cli.worker_addresses import local_host_to
from kvxfer.control import SharedKey
from kvxfer.control.ports import MAX_PORT
from kvxfer.errors import InvalidUsage
from kvxfer.sweep.binding import LOOPBACK, Binding
from kvxfer.sweep.far_agent import Listener

NOBODY = "start kvxfer sweep --listen there, or correct --peer"
_LOOK_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define them."""
    far = parser.add_argument_group("two hosts (one listens, the other sweeps)")
    far.add_argument(
        "--listen", metavar="HOST:PORT", help="be the far side of sweeps, until Ctrl-C"
    )
    far.add_argument("--advertise-host", metavar="HOST", help="what the other side dials")
    far.add_argument("--peer", metavar="HOST:PORT", help="sweep with the side that listens there")
    far.add_argument("--bind", metavar="HOST", help="address here (default: of the way to --peer)")
    far.add_argument("--key", metavar="FILE", help="admit holders of this key (see kvxfer key)")
    far.add_argument("--insecure", action="store_true", help="bind beyond loopback without a key")


def parse_binding(args: argparse.Namespace) -> Binding:
    """How the side that sweeps is bound.

    Raises:
        InvalidUsage: an option of two hosts without ``--peer``, or a key that cannot be read.
        NotAvailable: no network leads to the peer.
    """
    if args.peer is None:
        for option in ("bind", "key", "advertise_host"):
            if getattr(args, option) is not None:
                raise InvalidUsage(
                    f"--{option.replace('_', '-')} is of sweeps between two hosts; give --peer or "
                    "--listen, or leave it"
                )
        return LOOPBACK
    return Binding(
        bind_host=args.bind or local_host_to(args.peer),
        advertise_host=args.advertise_host,
        key=_key(args),
        insecure=args.insecure,
    )


def listen(args: argparse.Namespace) -> int:
    """Print the address that ``--peer`` takes and serve sweeps, one after the other; returns 0.

    It ends at Ctrl-C, SIGTERM, or when the pipe on standard input closes.

    Raises:
        InvalidUsage: an address that cannot be read, or that lets others in without a key.
        NotAvailable: the port is in use.
    """
    with option_words(bind="--listen", ports="--listen", far=NOBODY):
        return _listen(args)


def _listen(args: argparse.Namespace) -> int:
    if args.peer is not None:
        raise InvalidUsage("--listen is the far side of another's sweep; leave --peer")
    host, port = parse_place(args.listen)
    binding = Binding(
        bind_host=host,
        advertise_host=args.advertise_host,
        key=_key(args),
        insecure=args.insecure,
    )
    parent = Parent()
    with Listener(port, binding) as listener:
        try:
            write(f"{listener.address}\n")
            while not parent.has_ended(_LOOK_S):
                pass
        except KeyboardInterrupt:
            pass
    return 0


def parse_place(text: str) -> tuple[str, int]:
    """Host and port to bind; port 0 takes a free one, and IPv6 has brackets.

    Raises:
        InvalidUsage: it cannot be read.
    """
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if (
        not host
        or (":" in host and not is_bracketed)
        or not (port.isascii() and port.isdecimal() and len(port) <= 5)
        or int(port) > MAX_PORT
    ):
        raise InvalidUsage(f"--listen: {text!r}; write HOST:PORT, such as 10.0.0.1:7500")
    return host, int(port)


def _key(args: argparse.Namespace) -> SharedKey | None:
    return None if args.key is None else SharedKey.read(args.key)
