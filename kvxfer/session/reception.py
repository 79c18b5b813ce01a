"""One request at its receiver: who writes it, and what is still to come."""

from dataclasses import dataclass, field

from kvxfer.control import ReserveReply, TableSpec
from kvxfer.layout import BlockTable, Share
from kvxfer.layout.shares import overlap
from kvxfer.session.ended import ended_text
from kvxfer.session.offers import Notice, Offer
from kvxfer.session.requests import refused
from kvxfer.session.state_machine import Machine
from kvxfer.session.states import RECEIVE_TABLE, ReceiveEvent, ReceiveLimits, Receiving


@dataclass(slots=True)
class Writer:
    """A rank of the sender.

    Attributes:
        shares: the layers and heads that it writes.
        committed: all of them are here.
        over: no write of it to this request can come any more.
        waits: it was told to wait until it hears that the request is decided.
    """

    shares: tuple[Share, ...]
    committed: bool = False
    over: bool = False
    waits: bool = False


@dataclass(slots=True)
class Reception:
    """A request that a sender wants to write here.

    Attributes:
        offer: what was asked for.
        num_pairs: pairs of a layer and a head that this rank holds: all are to be written.
        writers: the ranks that have asked, by connection.
        tables: its blocks, once granted: a table for each group of layers.
        reason: why it failed.
        quarantined: it failed, and its blocks wait for a writer.
    """

    offer: Offer
    num_pairs: int
    limits: ReceiveLimits
    writers: dict[str, Writer] = field(default_factory=dict)
    tables: tuple[BlockTable, ...] = ()
    reason: str = ""
    quarantined: bool = False
    machine: Machine[Receiving, ReceiveEvent] = field(init=False)

    def __post_init__(self) -> None:
        self.machine = Machine(RECEIVE_TABLE, self.limits)

    @property
    def state(self) -> Receiving:
        """Where it is."""
        return self.machine.state

    @property
    def is_terminal(self) -> bool:
        """Whether its notice was given."""
        return self.state in (Receiving.DONE, Receiving.FAILED)

    @property
    def is_covered(self) -> bool:
        """Whether every layer and head was committed: each has one sender."""
        committed = (one.shares for one in self.writers.values() if one.committed)
        return sum(share.size for shares in committed for share in shares) == self.num_pairs

    @property
    def is_drained(self) -> bool:
        """Whether no write can come any more."""
        return all(writer.over for writer in self.writers.values())

    def join(self, connection: str, shares: tuple[Share, ...], offer: Offer) -> str:
        """Let a rank take part; returns why it may not, empty where it may."""
        request_id = offer.request_id
        if offer != self.offer:
            return (
                f"request {request_id!r} is tokens {self.offer.tokens}, not {offer.tokens}; use a "
                "new id"
            )
        writer = self.writers.get(connection)
        if writer is not None:
            return "this rank has written its share already; use a new id" if writer.over else ""
        if self.state not in (Receiving.WAITING, Receiving.RECEIVING):
            return ended_text(request_id, self.reason)
        if self.has_any(shares):
            return f"request {request_id!r} is sent by another sender already; use a new id"
        self.writers[connection] = Writer(shares)
        return ""

    def has_any(self, shares: tuple[Share, ...]) -> bool:
        """Whether a rank that has asked writes some of these."""
        return any(
            overlap(one.layers, other.layers) and overlap(one.heads, other.heads)
            for writer in self.writers.values()
            for one in writer.shares
            for other in shares
        )

    def reply(self) -> ReserveReply:
        """What a rank is answered, of a request that does not wait."""
        request_id = self.offer.request_id
        if self.state is not Receiving.RECEIVING:
            return refused(request_id, ended_text(request_id, self.reason))
        return ReserveReply(
            request_id=request_id,
            state="granted",
            tables=[TableSpec(one.block_ids.tolist(), one.first_token) for one in self.tables],
        )

    def notice(self) -> Notice:
        """What the engine is told at the end."""
        return Notice(
            request_id=self.offer.request_id,
            tokens=self.offer.tokens,
            tables=self.tables,
            reason=self.reason,
            quarantined=self.quarantined,
        )
