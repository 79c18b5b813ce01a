"""What is in a request, told by its name: so a receiver can check bytes that it knows nothing of.

The name of a request says the seed of its pattern and the dtype that it was written in. A token's
key is its place in the request. So any rank of any layout can tell what belongs where.
"""

import hashlib
import re
from dataclasses import dataclass

import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.layout import DTYPE_BYTES
from kvxfer.sweep.token_runs import Ids, TokenRuns

_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"kvxfer\.([A-Za-z0-9_-]{1,64})\.([0-9]{1,9})\.([a-z0-9_]{1,32})")
_SEED_BYTES = 7


@dataclass(frozen=True, slots=True)
class Content:
    """The pattern of a request.

    Attributes:
        seed: of its pattern.
        dtype: that it was written in.
    """

    seed: int
    dtype: str


def request_name(run: str, number: int, dtype: str) -> str:
    """The name of request ``number`` of a run.

    Raises:
        InvalidUsage: ``run`` has other characters than letters, digits, ``_`` and ``-``.
    """
    if _RUN.fullmatch(run) is None:
        raise InvalidUsage(f"name {run[:80]!r}; use 1 to 64 letters, digits, _ and -")
    return f"kvxfer.{run}.{number}.{dtype}"


def content_of(request_id: str) -> Content | None:
    """What a request holds; None of one whose name says nothing, as an engine's."""
    match = _NAME.fullmatch(request_id)
    if match is None or match[3] not in DTYPE_BYTES:
        return None
    digest = hashlib.blake2b(request_id.encode(), digest_size=_SEED_BYTES).digest()
    return Content(int.from_bytes(digest, "big"), match[3])


def tokens_in_blocks(
    block_ids: Ids, block_size: int, tokens: range, first_token: int = 0
) -> TokenRuns:
    """Tokens of a request where its blocks hold them, under their places in the request.

    Args:
        block_ids: int64 ``[n]``, in the order of the tokens.
        block_size: tokens of a block.
        tokens: which.
        first_token: the token in the first slot of the first block.

    Raises:
        InvalidUsage: the blocks do not hold the tokens.
    """
    held = range(first_token, first_token + block_ids.size * block_size)
    if tokens and not held.start <= tokens.start < tokens.stop <= held.stop:
        raise InvalidUsage(f"tokens {tokens}; {block_ids.size} blocks hold {held}")
    cuts = range(first_token, held.stop + 1, block_size)
    starts = np.array([max(cut, tokens.start) for cut in cuts[:-1]], np.int64)
    stops = np.array([min(cut, tokens.stop) for cut in cuts[1:]], np.int64)
    used = np.flatnonzero(stops > starts)
    starts, stops = starts[used], stops[used]
    return TokenRuns(block_ids[used], (starts - first_token) % block_size, stops - starts, starts)
