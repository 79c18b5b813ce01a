"""Which engines a request goes to: the ones with the fewest tokens to work off.

With prefix affinity, tokens of a prompt that an engine has seen before do not count, so that a
request goes where its prefix is cached unless that engine is busier by more than that.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from kvxfer.pd.proxy.body import Body, Prompt, Unclear
from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.failure import Failure
from kvxfer.pd.proxy.options import Role

_UNKNOWN_OUTPUT: Final = 256  # tokens of a request that does not say
_MAX_OUTPUT: Final = 1 << 20


class Affinity(Protocol):
    """How much of a prompt an engine has seen."""

    def seen_tokens(self, engine: Engine, keys: Sequence[bytes]) -> int:
        """Tokens of the prompt with these keys."""

    def remember(self, engine: Engine, keys: Sequence[bytes]) -> None:
        """The engine is getting that prompt."""

    def keys(self, prompt: Prompt) -> list[bytes]:
        """Names of a prompt's prefixes, the shortest first."""


class NoAffinity:
    """Engines are alike."""

    def seen_tokens(self, engine: Engine, keys: Sequence[bytes]) -> int:
        """None."""
        return 0

    def remember(self, engine: Engine, keys: Sequence[bytes]) -> None:
        """Nothing to remember."""

    def keys(self, prompt: Prompt) -> list[bytes]:
        """None are needed."""
        return []


class PrefixAffinity:
    """Remembers, for each engine, prefixes of the prompts sent there; the oldest are forgotten.

    A prefix is a number of pieces of the prompt's JSON, and is known by a digest of all of them.
    """

    PIECE_BYTES: Final = 256
    MAX_PIECES: Final = 512
    MAX_PREFIXES: Final = 1 << 16  # of one engine

    def __init__(self) -> None:
        self._seen: dict[Engine, OrderedDict[bytes, None]] = {}

    def keys(self, prompt: Prompt) -> list[bytes]:
        """A digest for every whole piece, of all up to it."""
        digest, keys = hashlib.blake2b(digest_size=16), []
        num_pieces = min(len(prompt.text) // self.PIECE_BYTES, self.MAX_PIECES)
        for start in range(0, num_pieces * self.PIECE_BYTES, self.PIECE_BYTES):
            digest.update(prompt.text[start : start + self.PIECE_BYTES])
            keys.append(digest.digest())
        return keys

    def seen_tokens(self, engine: Engine, keys: Sequence[bytes]) -> int:
        """Tokens of the longest prefix that the engine was sent before."""
        seen = self._seen.get(engine, ())
        num_seen = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        return num_seen * self.PIECE_BYTES // 4

    def remember(self, engine: Engine, keys: Sequence[bytes]) -> None:
        """Count these prefixes as seen, and as used last."""
        seen = self._seen.setdefault(engine, OrderedDict())
        for key in keys:
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > self.MAX_PREFIXES:
            seen.popitem(last=False)


class Router:
    """Chooses among the engines that are up."""

    def __init__(self, engines: Sequence[Engine], routing: str) -> None:
        self._engines = engines
        self._affinity: Affinity = (
            PrefixAffinity() if routing == "prefix-affinity" else NoAffinity()
        )
        self._num_choices = 0

    def choose(self, body: Body, roles: Collection[Role]) -> dict[Role, Engine]:
        """An engine for each of ``roles``.

        Raises:
            Failure: 503, all engines of a role are down, and why.
        """
        self._num_choices += 1  # equal engines take turns
        prompt = prompt_of(body)
        keys = self._affinity.keys(prompt)
        chosen = {role: self._least(role, prompt, keys) for role in roles}
        for engine in chosen.values():
            self._affinity.remember(engine, keys)
        return chosen

    def _least(self, role: Role, prompt: Prompt, keys: Sequence[bytes]) -> Engine:
        engines = [engine for engine in self._engines if engine.role == role]
        up = [engine for engine in engines if engine.is_up]
        if not up:
            reasons = "; ".join(f"{engine.name}: {engine.down_reason}" for engine in engines)
            raise Failure(503, f"no {role} engine is up ({reasons}); try again later")
        turn = self._num_choices % len(up)
        return min(
            up[turn:] + up[:turn],
            key=lambda engine: (
                engine.outstanding_tokens
                + max(0, prompt.num_tokens - self._affinity.seen_tokens(engine, keys)),
                engine.outstanding_requests,
            ),
        )


def prompt_of(body: Body) -> Prompt:
    """The prompt, or where it is not clear one as long as the body."""
    try:
        return body.prompt()
    except Unclear:
        return Prompt(b"", len(body.raw) // 4, is_exact=False)


def output_tokens(body: Body) -> int:
    """How many tokens a request may make, as a load."""
    try:
        asked = body.max_tokens(_UNKNOWN_OUTPUT) * max(1, body.number("n", 1))
    except Unclear:
        return _UNKNOWN_OUTPUT
    return min(max(0, asked), _MAX_OUTPUT)
