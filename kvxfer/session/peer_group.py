"""All ranks of the other side as one: a request's blocks are matched once and posted to each."""

import logging
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import TypeAlias, cast

import numpy as np

from kvxfer.closing import Closing
from kvxfer.errors import InvalidUsage, KvxferError, TransferTimeout
from kvxfer.layout import BlockMap, Blocks, BlockTable, BlockTables, CopyPlan
from kvxfer.session.coverage import require_complete
from kvxfer.session.peer import Peer
from kvxfer.transport import After, Op, Transfer, Tuning

_log = logging.getLogger(__name__)
RankedBlocks: TypeAlias = Blocks | Sequence[Blocks]
"""One table that holds for all ranks, or one a rank."""


class GroupTransfer:
    """What was posted to the ranks of a group.

    Attributes:
        transfers: one for each rank that takes part, in the order of `PeerGroup.peers`.
        num_bytes: bytes of all of them.
    """

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        """Of transfers that were posted."""
        self.transfers = tuple(transfers)
        self.num_bytes = sum(transfer.num_bytes for transfer in self.transfers)

    def poll(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s``; True once the bytes of all are visible to their readers.

        Raises:
            TransferFailed: one ended without delivering; others may be in flight.
            CudaError: the GPU failed.
        """
        deadline = time.monotonic() + timeout_s
        return all(
            transfer.poll(max(deadline - time.monotonic(), 0.0)) for transfer in self.transfers
        )

    def wait(self, timeout_s: float = 30.0) -> None:
        """Return once the bytes of all are visible to their readers.

        Where one fails the others are waited for before its error is raised.

        Raises:
            TransferTimeout: not within ``timeout_s``; pages may still be written.
            TransferFailed: one ended without delivering.
        """
        deadline = time.monotonic() + timeout_s
        errors: list[KvxferError] = []
        for transfer in self.transfers:
            try:
                transfer.wait(max(deadline - time.monotonic(), 0.0))
            except KvxferError as error:
                errors.append(error)
        if errors:  # what may still be written is the worst news
            raise next((one for one in errors if isinstance(one, TransferTimeout)), errors[0])


class PeerGroup(Closing):
    """The ranks of the other side, each reachable from this one. A context manager.

    Attributes:
        peers: one a rank.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        """Of peers of one endpoint, which are closed with the group.

        Raises:
            InvalidUsage: no peers.
        """
        if not peers:
            raise InvalidUsage("a group of no ranks; connect to those of the other side")
        self.peers = tuple(peers)
        self._take_part: dict[Op, tuple[int, ...]] = {}

    def put(
        self,
        local_blocks: Blocks,
        remote_blocks: RankedBlocks,
        *,
        tokens: range | None = None,
        layers: Collection[int] | None = None,
        tuning: Tuning | None = None,
        after: After = None,
    ) -> GroupTransfer:
        """Write to every rank what is this rank's to send.

        Args:
            local_blocks: the request's blocks here, as for :meth:`Peer.plan`.
            remote_blocks: its blocks over there: one table for all ranks, or a list of one a peer.
            tokens: which tokens of the request; None as for :meth:`Peer.plan`.
            layers: only these, numbered as in the whole model; None = all.
            tuning: how to run the copies.
            after: what must be done before the first byte is read; see :meth:`Link.post`.

        Returns:
            A transfer to each rank that this one sends anything to (:meth:`Peer.shares`), and it
            is told even where these layers and tokens leave nothing for it.

        Raises:
            InvalidUsage: a rank that takes part is missing from the group, or there twice.
            KvxferError: what :meth:`Peer.put` raises. Wrong blocks are refused before anything is
                posted; where posting fails midway, what was posted is waited for.
        """
        plans = self._plans(Op.PUT, local_blocks, remote_blocks, tokens, layers)
        return _post(Op.PUT, plans, tuning, after)

    def get(
        self,
        remote_blocks: RankedBlocks,
        local_blocks: Blocks,
        *,
        tokens: range | None = None,
        layers: Collection[int] | None = None,
        tuning: Tuning | None = None,
        after: After = None,
    ) -> GroupTransfer:
        """Read from every rank what is its to send to this one. The rest is as for :meth:`put`."""
        plans = self._plans(Op.GET, local_blocks, remote_blocks, tokens, layers)
        return _post(Op.GET, plans, tuning, after)

    def close(self) -> None:
        """Close every connection, also behind one that cannot be; may be called more than once.

        Raises:
            TransferTimeout: transfers in flight did not end; see :meth:`Peer.close`.
        """
        with ExitStack() as stack:
            for peer in self.peers:
                stack.callback(peer.close)

    def _plans(
        self,
        op: Op,
        local_blocks: Blocks,
        remote_blocks: RankedBlocks,
        tokens: range | None,
        layers: Collection[int] | None,
    ) -> list[tuple[Peer, CopyPlan]]:
        remote_tables = self._one_a_peer(remote_blocks)
        layers = None if layers is None else frozenset(layers)  # an iterator would last once
        matched: dict[tuple[int, ...], BlockMap] = {}
        plans = []
        for index in self._indices(op):
            peer, remote = self.peers[index], remote_tables[index]
            route = peer.route(op, layers)
            sizes = (route.src.layout.block_size, route.dst.layout.block_size)
            key = (id(remote), *sizes)
            if key not in matched:
                tables = (local_blocks, remote) if op is Op.PUT else (remote, local_blocks)
                matched[key] = BlockMap(
                    *tables, src_block_size=sizes[0], dst_block_size=sizes[1], tokens=tokens
                )
            plans.append((peer, peer.plan_matched(op, matched[key], layers=layers)))
        return plans

    def _indices(self, op: Op) -> tuple[int, ...]:
        """The peers that take part in ``op``, once it is known that none is missing."""
        if op not in self._take_part:
            require_complete(self.peers[0].near, [peer.view.shard for peer in self.peers], op)
            self._take_part[op] = tuple(
                index for index, peer in enumerate(self.peers) if peer.shares(op)
            )
        return self._take_part[op]

    def _one_a_peer(self, blocks: RankedBlocks) -> Sequence[Blocks]:
        num_peers = len(self.peers)
        if not _is_ranked(blocks):
            return [cast(Blocks, blocks)] * num_peers
        tables = cast(Sequence[Blocks], blocks)
        if len(tables) != num_peers:
            raise InvalidUsage(
                f"{len(tables)} block tables for {num_peers} ranks; give one for all, or one a rank"
            )
        return tables


def _is_ranked(blocks: RankedBlocks) -> bool:
    if isinstance(blocks, BlockTable | BlockTables | np.ndarray) or not len(blocks):
        return False
    return isinstance(blocks[0], BlockTable | np.ndarray | Sequence)


def _post(
    op: Op,
    plans: Sequence[tuple[Peer, CopyPlan]],
    tuning: Tuning | None,
    after: After,
) -> GroupTransfer:
    posted: list[Transfer] = []
    try:
        for peer, copy in plans:
            posted.append(peer.link.post(copy, op, tuning=tuning, after=after))
    except Exception as error:
        # Nobody will hold these, and the caller may use the pages again once this has failed.
        try:
            GroupTransfer(posted).wait()
        except TransferTimeout as late:
            raise late from error
        except KvxferError as failed:
            _log.info("a copy to another rank has failed too: %s", failed)
        raise
    return GroupTransfer(posted)
