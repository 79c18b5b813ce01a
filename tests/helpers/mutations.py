"""Wrong metadata: bytes spoiled anywhere, and msgpack whose values are out of place."""

import random
from typing import Any

import msgspec

_INTEGERS = [0, -1, 1, 3, 1 << 12, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 45, (1 << 63) - 1, 1 << 63]
_OTHERS: list[Any] = [None, True, 1.5, "", "x" * 4096, b"", b"\0" * 16, [], {}, [[[[[]]]]]]


def mutate(blob: bytes, random_: random.Random) -> bytes:
    """One wrong version of ``blob``."""
    return random_.choice((_flip, _cut, _repeat, _noise, _value, _value, _value))(blob, random_)


def _flip(blob: bytes, random_: random.Random) -> bytes:
    data = bytearray(blob)
    for _ in range(random_.choice((1, 1, 2, 8))):
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    return bytes(data)


def _cut(blob: bytes, random_: random.Random) -> bytes:
    begin, end = sorted(random_.randrange(len(blob) + 1) for _ in range(2))
    return blob[:begin] + blob[end:]


def _repeat(blob: bytes, random_: random.Random) -> bytes:
    begin, end = sorted(random_.randrange(len(blob) + 1) for _ in range(2))
    return blob[:end] + blob[begin:]


def _noise(blob: bytes, random_: random.Random) -> bytes:
    return random_.randbytes(random_.choice((0, 1, 16, len(blob), 1 << 16)))


def _value(blob: bytes, random_: random.Random) -> bytes:
    """Well-formed msgpack with one leaf replaced: what a bit flip seldom reaches."""
    tree = msgspec.msgpack.decode(blob)
    places = list(_leaves(tree))
    holder, key = random_.choice(places)
    old = holder[key]
    if type(old) is int and random_.random() < 0.8:
        holder[key] = random_.choice([*_INTEGERS, old + 1, old - 1, old * 2, old + 4096])
    elif type(old) is bytes and random_.random() < 0.5:
        holder[key] = random_.randbytes(len(old))
    else:
        holder[key] = random_.choice(_OTHERS)
    return msgspec.msgpack.encode(tree)


def _leaves(tree: Any) -> Any:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _leaves(value)
