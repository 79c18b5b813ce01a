"""What a peer library is to a sweep: a near side that moves pages, and a far side that lets it."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from kvxfer.closing import Closing
from kvxfer.layout import CopyPlan
from kvxfer.sweep.patterned_cache import PatternedCache
from kvxfer.transport import Op, Transfer

HOST = ("private", "shared")


@dataclass(frozen=True, slots=True)
class Row:
    """One way to use a library, which is one row of the table.

    Attributes:
        name: in the table.
        environment: variables of both processes; None = not set.
        tuned: the best settings known, not the library's own.
    """

    name: str
    environment: Mapping[str, str | None] = field(default_factory=dict)
    tuned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Both pools, as the near side sees them.

    Attributes:
        op: put: near to far; get: far to near.
        near_address: start of the pool of this process.
        near_device: its GPU; -1 = host memory.
        mapped_address: start of the far pool in plans: where it is mapped here, if it is.
        far_address: start of the far pool in the far process.
        far_device: its GPU as the far process numbers it.
        num_bytes: of each pool.
        page_bytes: of each page; pools are whole pages.
        num_threads: CPU threads that a copy may use.
        contact: what the far side has said of itself.
    """

    op: Op
    near_address: int
    near_device: int
    mapped_address: int
    far_address: int
    far_device: int
    num_bytes: int
    page_bytes: int
    num_threads: int
    contact: bytes


class Mover(Closing):
    """The near side of a library. A context manager.

    Attributes:
        settings: how it is used, for the row.
        num_threads: CPU threads that copy; 0 where the library or a GPU does.
    """

    settings: str
    num_threads: int = 0

    @abstractmethod
    def ready(self, plan: CopyPlan) -> Callable[[], Transfer]:
        """Prepare all that can be prepared of a request, untimed; what is returned starts it.

        Raises:
            KvxferError: the library refuses.
        """

    def close(self) -> None:
        """Give up the library; may be called more than once."""


class FarSide(Closing):
    """The far side of a library.

    Attributes:
        contact: what the near side must know; the process id where a library needs nothing.
    """

    def __init__(self, contact: bytes | None = None) -> None:
        self.contact = str(os.getpid()).encode() if contact is None else contact

    def close(self) -> None:
        """Give up the library; may be called more than once."""


class PeerLibrary(ABC):
    """A library, or a function of the system, that can move pages.

    Attributes:
        name: on the command line.
        memory: memory of the far side that it moves, the best first.
        modules: names that it is imported by, any of them; none = part of the system.
        install: what installs it.
        rows: the ways to use it.
    """

    name: str
    memory: tuple[str, ...]
    modules: tuple[str, ...] = ()
    install: str = ""

    @property
    def rows(self) -> tuple[Row, ...]:
        """One, named as the library."""
        return (Row(self.name),)

    def missing(self) -> str:
        """Why it cannot be used here; empty where nothing is missing."""
        if not self.modules or any(find_spec(module) for module in self.modules):
            return ""
        return f"not installed: {self.install}"

    @abstractmethod
    def connect(self, ends: Ends, row: Row) -> Mover:
        """The near side.

        Raises:
            NotAvailable: the library cannot be loaded, or does not work here.
        """

    def serve(self, pool: PatternedCache, row: Row) -> FarSide:
        """The far side of a pool; that of most does nothing.

        Raises:
            NotAvailable: the library cannot be loaded, or does not work here.
        """
        return FarSide()
