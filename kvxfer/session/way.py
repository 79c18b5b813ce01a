"""Where a delivery writes: the blocks that a peer has granted, and what is on its way to them."""

from kvxfer.control import ReserveReply
from kvxfer.errors import ProtocolMismatch
from kvxfer.layout import BlockMap, BlockTable, BlockTables, match_blocks
from kvxfer.layout.shares import overlap
from kvxfer.session.grants import misfit
from kvxfer.session.parts import Part
from kvxfer.session.peer import Peer
from kvxfer.session.poster import Poster
from kvxfer.transport import Op, Transfer, Tuning


class Way:
    """The copies of one attempt at a request. All methods are of the sender's thread.

    Attributes:
        peer: the rank that is written to.
        num_posted: parts that were posted.
        num_bytes: bytes of them.
        sequence: number of the last transfer that has ended; 0 where there was nothing to move.
        path: what carried it.
        in_flight: transfers that have not ended.
    """

    def __init__(self, peer: Peer, poster: Poster, tokens: range, reply: ReserveReply) -> None:
        """To the blocks of a grant for ``tokens`` of a request, by the poster of the peer's link.

        Raises:
            ProtocolMismatch: they do not fit what was asked for.
        """
        self.peer = peer
        self._poster = poster
        self.num_posted = self.num_bytes = self.sequence = 0
        self.path = ""
        self.in_flight: list[Transfer] = []
        self._blocks = _granted(peer, tokens, reply)
        self._end = tokens.stop
        # What lies before a table is over there already.
        self._wanted = [range(one.first_token, tokens.stop) for one in self._blocks.tables]
        self._matched: tuple[Part, BlockMap] | None = None

    @property
    def is_full(self) -> bool:
        """Whether a further part must wait, so that the thread stays free for other requests."""
        return self._poster.is_full

    @property
    def must_look(self) -> bool:
        """Whether copies are in flight of whose end nobody tells."""
        return bool(self.in_flight) and not self._poster.tells

    def post(self, part: Part, tuning: Tuning | None) -> None:
        """Start to copy what the peer wants of a part, which may be nothing."""
        self.num_posted += 1
        plan = self.peer.plan_matched(Op.PUT, self._match(part), layers=part.layers)
        if not plan.num_pages:
            return
        transfer = self._poster.post(plan, Op.PUT, tuning=tuning, after=part.after)
        self.num_bytes += transfer.num_bytes
        self.in_flight.append(transfer)

    def collect(self) -> None:
        """Forget the transfers that have ended; raises what one of them ended with.

        What its link has given up and cannot end stays in flight in its place.
        """
        while self.in_flight:
            transfer = self.in_flight[0]
            try:
                ended = transfer.poll(0.0)
            except Exception:
                given_up = self.peer.link.given_up
                self.in_flight[:1] = [] if given_up is None else [given_up]
                raise
            if not ended:
                return
            self.in_flight.pop(0)
            self.sequence, self.path = transfer.sequence, transfer.actual_path

    def _match(self, part: Part) -> BlockMap:
        """The tables of both sides, matched once for the layers of a chunk."""
        if self._matched is not None:
            last, matched = self._matched
            if last.blocks is part.blocks and last.tokens == part.tokens:
                return matched
        matched = match_blocks(
            self.peer.near_view,
            self.peer.view,
            part.blocks,
            self._blocks,
            tokens=[overlap(part.tokens, wanted) for wanted in self._wanted],
            end=self._end,
        )
        self._matched = (part, matched)
        return matched


def _granted(peer: Peer, tokens: range, reply: ReserveReply) -> BlockTables:
    tables = [(len(one.block_ids), one.first_token) for one in reply.tables]
    wrong = misfit(peer.view.shard.model, tokens, tables)
    last_id = max(reply.block_ids, default=-1)
    if wrong or last_id >= peer.view.num_blocks:
        raise ProtocolMismatch(
            f"the receiver granted what does not fit: {wrong or 'a block'}; the last of its ids is "
            f"{last_id}, its cache has {peer.view.num_blocks} blocks"
        )
    # A table of no blocks may begin anywhere.
    return BlockTables(
        BlockTable(one.block_ids, min(one.first_token, tokens.stop)) for one in reply.tables
    )
