"""Digests of the KV that is handed over, on both sides, for a comparison afterwards.

With ``KVXFER_DIGESTS=FILE`` each worker appends a line of JSON a request: the prefill engine's once
the request has left (its blocks are still held), the decode engine's once its KV is there and
before any step uses it. A line has, for each layer, a digest (`PageSums`) of every block that is
whole: one that tokens of the prompt fill, and that the hand-over was to write. The block of the
prompt's end is left out, and so is what a window needs in part or not at all, or what the decoder
had in its prefix cache. ``bench/kv_bytes.py`` compares.

Workers wait for the GPU meanwhile: this is for checking, not for timing. A prefill is taken to end
with its first token, as proxies have it: one that goes on gives blocks of sliding layers back.
"""

import fcntl
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from kvxfer.connectors.vllm.cache_map import CacheMap
from kvxfer.connectors.vllm.page_sums import NUM_SUMS, PageSums
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.receive_side import Ended
from kvxfer.connectors.vllm.step import NULL_BLOCK, SendStart, StepPlan, Table
from kvxfer.env import digests_file
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout, KVShard

DIGEST_BYTES: Final = 8 * NUM_SUMS
MAX_FILE_BYTES: Final = 1 << 30
"""From where on a process writes nothing more."""
MARK: Final = b'{"kv_digests":1,'
"""How each line begins."""
_log = logging.getLogger(__name__)

Side = Literal["sent", "received"]


class BlockDigests(msgspec.Struct, frozen=True):
    """Of layers that have the same blocks.

    Args:
        blocks: their places in the prompt: block ``i`` holds the tokens from ``i * block_tokens``.
        layers: by vLLM's name of a layer `DIGEST_BYTES` a block.
    """

    blocks: list[int]
    layers: dict[str, bytes]


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kv_digests", tag=1):
    """What a rank has of a request.

    Args:
        side: which engine's.
        transfer: the id that both legs have.
        attempt: of the sender, from 1; 0 of a receiver, which takes the one that succeeds.
        num_tokens: that are handed over: all of the prompt but the last.
        rank: which rank of how many.
        layout: what the rank's caches look like; digests of different layouts say nothing.
        has_replicas: other ranks hold some of its heads too, and share the work of sending them.
        block_tokens: tokens of a block.
        block_bytes: of a block in one layer of this rank.
        groups: digests.
    """

    side: Side
    transfer: str
    attempt: int = 0
    num_tokens: int
    rank: str
    layout: str
    has_replicas: bool
    block_tokens: int
    block_bytes: int
    groups: list[BlockDigests]


@dataclass(slots=True)
class _Request:
    """What is known of one.

    Attributes:
        blocks: of each group of layers, the scheduler's block ids by their place in the prompt.
        is_whole: all of its parts were scheduled.
        is_void: it was sent whole before, and which of the two came is not known here.
    """

    transfer: str
    num_tokens: int
    attempt: int = 0
    blocks: dict[int, dict[int, int]] = field(default_factory=dict)
    is_whole: bool = False
    is_void: bool = False

    def add(self, tables: Iterable[Table], block_size: int) -> None:
        for group, table in enumerate(tables):
            first = table.first_token // block_size
            self.blocks.setdefault(group, {}).update(enumerate(table.block_ids, first))


class Digests:
    """Of one worker; follows what its scheduler says, and never fails its caller."""

    def __init__(self, path: Path, caches: CacheMap, shard: KVShard) -> None:
        """Written to ``path``, which is made with the first line."""
        self._file = _Appended(path)
        self._pages, self._layout = caches.pages, shard.layout
        self._arrays: Mapping[str, Any] = dict(zip(caches.layer_of, caches.arrays, strict=True))
        self._sums = PageSums(shard.layout)
        self._rank = rank_text(shard)
        self._has_replicas = shard.model.num_kv_heads % shard.rank.tp_size > 0
        self._outgoing: dict[str, _Request] = {}
        self._incoming: dict[str, _Request] = {}
        _log.warning("digests of KV go to %s: a check, which makes hand-overs slower", path)

    @classmethod
    def wanted(cls, caches: CacheMap, shard: KVShard) -> "Digests | None":
        """As the environment says; None where nobody asks for them."""
        path = digests_file()
        return None if path is None else cls(path, caches, shard)

    def begin_step(self, plan: StepPlan) -> None:
        """Take up what the scheduler says."""
        size = self._scheduler_block_tokens
        for start in plan.starts:
            self._begin(start)
        for part in plan.parts:
            if (found := self._outgoing.get(part.request_id)) is not None:
                found.add(part.tables, size)
                found.is_whole = part.is_last
        for request_id in plan.cancelled:
            found = self._outgoing.get(request_id)
            if found is not None and not found.is_whole:  # else its end may only have come late
                del self._outgoing[request_id]
        for placement in plan.placements:
            if placement.awaited:
                made = _Request(placement.transfer_id, placement.num_tokens)
                made.add(placement.tables, size)
                self._incoming[placement.request_id] = made
        gone = {one.transfer_id for one in plan.given_up}
        for request_id in [name for name, one in self._incoming.items() if one.transfer in gone]:
            del self._incoming[request_id]

    def sent(self, request_ids: Iterable[str]) -> None:
        """These are over on the prefill side; their blocks go once the scheduler hears of it."""
        for request_id in request_ids:
            found = self._outgoing.pop(request_id, None)
            if found is not None and found.is_whole and not found.is_void:
                self._write("sent", found)

    def received(self, ended: Iterable[Ended]) -> None:
        """The wait of these is over on the decode side; no step has used them yet."""
        for one in ended:
            found = self._incoming.pop(one.request_id, None)
            if found is not None and not one.is_failed:
                self._write("received", found)

    def close(self) -> None:
        """Write nothing more, and let go of the caches."""
        self._file.close()
        self._arrays = {}

    @property
    def _scheduler_block_tokens(self) -> int:
        return self._block_tokens * self._pages.ratio

    @property
    def _block_tokens(self) -> int:
        return self._pages.block_units * self._pages.unit_tokens

    def _begin(self, start: SendStart) -> None:
        before = self._outgoing.get(start.request_id)
        made = _Request(start.transfer_id, start.num_tokens, start.attempt)
        made.is_void = before is not None and (before.is_whole or before.is_void)
        self._outgoing[start.request_id] = made

    def _write(self, side: Side, request: _Request) -> None:
        if not self._arrays:
            return
        try:
            groups = self._groups(request)
            if groups:
                self._file.append(msgspec.json.encode(self._line(side, request, groups)) + b"\n")
        except (InvalidUsage, OSError, RuntimeError) as error:  # a GPU's too
            _log.warning("no more digests: %s", error)
            self.close()

    def _line(self, side: Side, request: _Request, groups: list[BlockDigests]) -> Line:
        layout = self._layout
        return Line(
            side=side,
            transfer=request.transfer,
            attempt=request.attempt,
            num_tokens=request.num_tokens,
            rank=self._rank,
            layout=layout_text(layout, self._pages),
            has_replicas=self._has_replicas,
            block_tokens=self._block_tokens,
            block_bytes=layout.planes_per_layer * layout.page_bytes,
            groups=groups,
        )

    def _groups(self, request: _Request) -> list[BlockDigests]:
        """Digests of all layers; none of a request without whole blocks."""
        names: list[str] = []
        places: list[tuple[int, ...]] = []
        sums = []
        for layer, (name, array) in enumerate(self._arrays.items()):
            blocks = dict(self._whole_blocks(layer, request))
            if blocks:
                names.append(name)
                places.append(tuple(blocks))
                sums.append(self._sums.of(array, np.fromiter(blocks.values(), np.int64)))
        found: dict[tuple[int, ...], dict[str, bytes]] = {}
        for name, place, taken in zip(
            names, places, self._sums.taken(sums) if sums else (), strict=True
        ):
            found.setdefault(place, {})[name] = taken
        return [BlockDigests(list(place), layers) for place, layers in found.items()]

    def _whole_blocks(self, layer: int, request: _Request) -> Iterator[tuple[int, int]]:
        """Place in the prompt and id of each block of the cache that is to be compared."""
        held = request.blocks.get(self._layout.group_of(layer), {})
        ratio = self._pages.ratio
        for place in whole_blocks(self._layout, self._pages, layer, request.num_tokens):
            number, part = divmod(place, ratio)
            block_id = held.get(number, NULL_BLOCK)
            if block_id != NULL_BLOCK:
                yield place, block_id * ratio + part


def whole_blocks(layout: KVLayout, pages: Pages, layer: int, num_tokens: int) -> range:
    """The blocks of a cache, by place in the prompt, that a hand-over writes from end to end."""
    units = range(pages.num_units(num_tokens))
    begin = -(-layout.needed_by(layer, units).start // layout.block_size)
    return range(begin, num_tokens // (pages.block_units * pages.unit_tokens))


def rank_text(shard: KVShard) -> str:
    """Which rank, as lines have it."""
    rank = shard.rank
    return f"tp {rank.tp_rank}/{rank.tp_size} pp {rank.pp_rank}/{rank.pp_size}"


def layout_text(layout: KVLayout, pages: Pages) -> str:
    """What a rank's caches look like, as lines have it."""
    return (
        f"{layout.num_layers} layers of {layout.num_kv_heads} heads of {layout.head_dim} "
        f"{layout.dtype}, {layout.kv.value}, {layout.order.value}, {pages.format} blocks of "
        f"{layout.block_size}"
    )


class _Appended:
    """A file that several processes append lines to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._num_bytes = 0

    def append(self, line: bytes) -> None:
        """Write a whole line.

        Raises:
            OSError: it cannot be written.
            InvalidUsage: too much was written already.
        """
        self._num_bytes += len(line)
        if self._num_bytes > MAX_FILE_BYTES:
            raise InvalidUsage(f"{MAX_FILE_BYTES} bytes of {self._path} are enough")
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # a long line may take several writes
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file of digests; a last one that is not whole is left out.

    Raises:
        InvalidUsage: it cannot be read, or holds something else.
    """
    try:
        with path.open("rb") as file:
            pieces = iter(lambda: file.readline(MAX_FILE_BYTES + 1), b"")
            for number, line in enumerate(pieces, 1):
                if len(line) > MAX_FILE_BYTES:
                    raise InvalidUsage(f"{path}, line {number}: over {MAX_FILE_BYTES} bytes")
                if line.endswith(b"\n"):
                    yield _read_line(path, number, line)
    except OSError as error:
        raise InvalidUsage(f"cannot read {path}: {error.strerror}") from error


def _read_line(path: Path, number: int, text: bytes) -> Line:
    try:
        line = msgspec.json.decode(text, type=Line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(f"{path}, line {number}: {error}") from error
    for group in line.groups:
        size = DIGEST_BYTES * len(group.blocks)
        if any(len(digests) != size for digests in group.layers.values()):
            raise InvalidUsage(f"{path}, line {number}: not a digest for each block")
    return line
