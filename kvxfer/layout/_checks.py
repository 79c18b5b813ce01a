"""Checks that the values of this room share; a failure names the field, the value and the limit."""

import operator
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import SupportsIndex, TypeVar, cast

from kvxfer.errors import InvalidUsage

# Far above any model or machine, and low enough that the number of planes fits the 32 bits that the
# native plan gives it.
MAX_DIMENSION = 1 << 24
MAX_NUM_BLOCKS = (1 << 32) - 1
# One block in all planes; keeps every size of a page inside 64 bits.
MAX_BLOCK_BYTES = 1 << 62
ADDRESS_SPACE_BYTES = 1 << 64
MAX_NUM_TOKENS = 1 << 40
MAX_GROUPS = 256

E = TypeVar("E", bound=Enum)


def integer(field: str, value: object, *, minimum: int, maximum: int) -> int:
    """Return ``value`` as a Python int within ``minimum .. maximum``; numpy integers are taken.

    Raises:
        InvalidUsage: no integer (bool is none), or outside the limits.
    """
    allowed = f"use an integer of {minimum} .. {maximum}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidUsage(f"{field} is {value!r} ({type(value).__name__}); {allowed}")
    try:
        number = operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise InvalidUsage(f"{field} is {value!r} ({type(value).__name__}); {allowed}") from None
    if not minimum <= number <= maximum:
        raise InvalidUsage(f"{field} is {number}; {allowed}")
    return number


def dimension(field: str, value: object) -> int:
    """Return ``value`` as an int of 1 .. 2**24.

    Raises:
        InvalidUsage: see `integer`.
    """
    return integer(field, value, minimum=1, maximum=MAX_DIMENSION)


def num_tokens(value: object) -> int:
    """Return a token count as an int of 0 .. 2**40.

    Raises:
        InvalidUsage: see `integer`.
    """
    return integer("num_tokens", value, minimum=0, maximum=MAX_NUM_TOKENS)


def windows(values: Sequence[object], *, num_layers: int) -> tuple[int, ...]:
    """Return the windows of ``num_layers`` layers, 0 = none; () where no layer has one.

    Raises:
        InvalidUsage: a window that is no integer of 0 .. 2**40, or not one a layer.
    """
    if len(values) not in (0, num_layers):
        raise InvalidUsage(
            f"windows has {len(values)} entries for {num_layers} layers; give one a layer, or none"
        )
    checked = tuple(
        integer(f"windows[{layer}]", window, minimum=0, maximum=MAX_NUM_TOKENS)
        for layer, window in enumerate(values)
    )
    return checked if any(checked) else ()


def groups(values: Sequence[object], *, num_layers: int) -> tuple[int, ...]:
    """Return the groups of ``num_layers`` layers; () where all are of group 0.

    Raises:
        InvalidUsage: a group that is no integer of 0 .. 255, or not one a layer.
    """
    if len(values) not in (0, num_layers):
        raise InvalidUsage(
            f"groups has {len(values)} entries for {num_layers} layers; give one a layer, or none"
        )
    checked = tuple(
        integer(f"groups[{layer}]", group, minimum=0, maximum=MAX_GROUPS - 1)
        for layer, group in enumerate(values)
    )
    return checked if any(checked) else ()


def layers(value: Iterable[int] | None, num_layers: int) -> frozenset[int] | None:
    """Return a selection of layers as a set; None stands for all.

    Raises:
        InvalidUsage: no integers of 0 .. ``num_layers`` - 1.
    """
    if value is None:
        return None
    allowed = f"use integers of 0 .. {num_layers - 1}, or None for all layers"
    if not isinstance(value, Iterable):
        raise InvalidUsage(f"layers is {value!r} ({type(value).__name__}); {allowed}")
    return frozenset(integer("layers", layer, minimum=0, maximum=num_layers - 1) for layer in value)


def member(field: str, value: object, *, of: type[E]) -> E:
    """Return the member of the enum ``of`` that ``value`` is or spells, in any case.

    Raises:
        InvalidUsage: no such member.
    """
    try:
        return of(value.lower() if type(value) is str else value)
    except ValueError:
        allowed = ", ".join(repr(choice.value) for choice in of)
        raise InvalidUsage(f"{field} is {value!r}; use one of {allowed}") from None
