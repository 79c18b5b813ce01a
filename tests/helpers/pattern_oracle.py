"""The core's test pattern in numpy: what one vector, a token's head in one plane, must hold."""

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]


def pattern(seed: int, key: int, num_words: int) -> Words:
    """One vector: the finaliser of SplitMix64 over seed, key and the place of the word."""
    place = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value = np.uint64((seed + key * 0xD1342543DE82EF95) & MASK) + place
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def vector(seed: int, plane_key: int, token: int, head: int, num_bytes: int) -> Bytes:
    """The bytes of one token and head, ``head`` counted in the whole model."""
    key = (plane_key + token * 4096 + head) & MASK
    return pattern(seed, key, -(-num_bytes // 8)).view(np.uint8)[:num_bytes]
