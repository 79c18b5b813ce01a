"""Both sides of one case: the local pool, the far agent's pool and the link between them."""

from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.errors import VerificationError
from kvxfer.session import Endpoint, Peer
from kvxfer.session.layouts import layout_spec
from kvxfer.sweep import messages
from kvxfer.sweep.agent import SweepAgent
from kvxfer.sweep.cases import SweepCase
from kvxfer.sweep.patterned_cache import PatternedCache, unlisted
from kvxfer.transport import Op

_Found: TypeAlias = messages.Checked | _core.PatternMismatch


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The blocks of the request on either side, int64 ``[num_blocks]``."""

    source: NDArray[np.int64]
    destination: NDArray[np.int64]


class Rig:
    """A connected pair for one case. A context manager.

    The side that runs the copy is this process: the source for put, the destination for get.

    Attributes:
        peer: the link to the far side.
        local: this side's pool.
    """

    def __init__(
        self,
        case: SweepCase,
        agent: SweepAgent,
        *,
        num_threads: int,
        devices: tuple[int, int],
    ) -> None:
        """Allocate both pools and connect them.

        Args:
            case: what to set up.
            agent: the far side.
            num_threads: threads of host copies, fills and checks, on either side.
            devices: CUDA devices of source and destination; ignored for host memory.
        """
        self._case = case
        self._agent = agent
        on_device = case.memory == "device"
        put = case.op is Op.PUT
        near, far = (devices if put else devices[::-1]) if on_device else (-1, -1)
        prepare = messages.Prepare(
            layout=layout_spec(case.layout),
            num_blocks=case.pool_blocks,
            memory=case.memory,
            device=far,
            transport=case.transport,
            num_threads=num_threads,
        )
        with ExitStack() as stack:
            stack.callback(agent.call, messages.Release())
            prepared = agent.call(prepare)
            self.local = PatternedCache(
                case.layout,
                case.pool_blocks,
                memory="device" if on_device else "private",
                device=near,
                num_threads=num_threads,
            )
            stack.callback(self.local.close)
            endpoint = stack.enter_context(
                Endpoint(self.local.cache, transport=case.transport, num_threads=num_threads)
            )
            self.peer: Peer = stack.enter_context(endpoint.connect(prepared.addresses))
            self._stack = stack.pop_all()

    def draw_tables(self, rng: np.random.Generator) -> BlockTables:
        """Block tables for one request, in the case's order on both sides."""
        draw = self._case.block_order.draw
        count, pool = self._case.num_blocks, self._case.pool_blocks
        return BlockTables(draw(count, pool, rng), draw(count, pool, rng))

    def fill_source(self, seed: int, block_ids: NDArray[np.int64] | None = None) -> None:
        """Write the pattern of ``seed`` on the source; None = all blocks."""
        if self._case.op is Op.PUT:
            self.local.fill(seed, block_ids)
        else:
            ids = [] if block_ids is None else block_ids.tolist()
            self._agent.call(messages.Fill(seed=seed, block_ids=ids))

    def fill_destination(self, seed: int) -> None:
        """Overwrite the whole destination pool."""
        if self._case.op is Op.PUT:
            self._agent.call(messages.Fill(seed=seed))
        else:
            self.local.fill(seed)

    def require_delivered(self, seed: int, tables: BlockTables) -> None:
        """Check every byte of the request on the destination, by the destination.

        Raises:
            VerificationError: a byte differs; says how many words, and where the first is.
        """
        self._require_equal(seed, tables.destination, tables.source, "the request")

    def require_untouched(self, seed: int, tables: BlockTables) -> None:
        """Check that all blocks of the destination outside the request still hold ``seed``.

        Raises:
            VerificationError: a byte was overwritten.
        """
        others = unlisted(tables.destination, self._case.pool_blocks)
        self._require_equal(seed, others, others, "blocks outside the request")

    def require_prefix(self, seed: int) -> None:
        """Check the bytes of the contiguous copy on the destination."""
        if self._case.op is Op.PUT:
            found = self._agent.call(
                messages.CheckPrefix(seed=seed, num_bytes=self._case.total_bytes)
            )
        else:
            found = self.local.check_prefix(seed, self._case.total_bytes)
        self._judge(found, "the contiguous copy")

    def start_compute(self, kind: str) -> None:
        """Start a compute load on the far side's GPU."""
        self._agent.call(messages.Compute(kind=kind, running=True))

    def stop_compute(self) -> float:
        """Stop it; median microseconds of its operation."""
        stopped: messages.Computed = self._agent.call(messages.Compute(kind="", running=False))
        return stopped.operation_us

    def close(self) -> None:
        """Disconnect and free both pools; may be called more than once."""
        self._stack.close()

    def __enter__(self) -> "Rig":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _require_equal(
        self, seed: int, block_ids: NDArray[np.int64], source_ids: NDArray[np.int64], what: str
    ) -> None:
        if self._case.op is Op.PUT:
            found = self._agent.call(
                messages.Check(
                    seed=seed, block_ids=block_ids.tolist(), source_ids=source_ids.tolist()
                )
            )
        else:
            found = self.local.check(seed, block_ids, source_ids)
        self._judge(found, what, block_ids)

    def _judge(self, found: _Found, what: str, block_ids: NDArray[np.int64] | None = None) -> None:
        wrong = found.num_wrong_words
        if wrong == 0:
            return
        page = found.first_page
        where = f"page {page}"
        if block_ids is not None:
            plane, index = divmod(page, block_ids.size)
            where = f"plane {plane}, block {block_ids[index]}"
        raise VerificationError(
            f"{what}: {wrong} of {self._case.total_bytes // 8} 8-byte words are wrong at the "
            f"destination, the first in {where}"
        )
