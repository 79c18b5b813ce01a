"""Where the two sides of a sweep listen, and who reaches them."""

from dataclasses import dataclass

from kvxfer.control import SharedKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The part of an endpoint's and a server's options that says who may come.

    Attributes:
        bind_host: where the channels listen, and a transport that listens.
        advertise_host: what the other side dials, where that is not ``bind_host``.
        key: admits its holders alone; connections from here use it too.
        insecure: bind beyond loopback without a key.
    """

    bind_host: str = "127.0.0.1"
    advertise_host: str | None = None
    key: SharedKey | None = None
    insecure: bool = False


LOOPBACK = Binding()
"""Of this host alone, without a key."""
