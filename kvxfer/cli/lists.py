"""Comma-separated options, read item by item; a failure names the option."""

import re
from collections.abc import Callable
from typing import TypeVar

from kvxfer.errors import InvalidUsage

_Item = TypeVar("_Item")
_PAIR = re.compile(r"([0-9]{1,4})\s*:\s*([0-9]{1,4})")


def parse_list(name: str, text: str, parse: Callable[[str], _Item]) -> tuple[_Item, ...]:
    """Every item of ``text``, once: what is named again is not measured again.

    Raises:
        InvalidUsage: there is none, or what ``parse`` raises.
    """
    parts = (item.strip() for item in text.split(","))
    items = tuple(dict.fromkeys(parse(part) for part in parts if part))
    if not items:
        raise InvalidUsage(f"{name}: {text!r} names nothing; give one value or more")
    return items


def positive(name: str) -> Callable[[str], int]:
    """A parser of whole numbers above zero."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,18}", text) or int(text) == 0:
            raise InvalidUsage(f"{name}: {text!r} is not a whole number above zero")
        return int(text)

    return parse


def one_of(name: str, allowed: tuple[str, ...]) -> Callable[[str], str]:
    """A parser of certain words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise InvalidUsage(f"{name}: {text!r}; use {' or '.join(allowed)}")
        return text

    return parse


def size_pair(name: str) -> Callable[[str], tuple[int, int]]:
    """A parser of ``source:destination`` sizes such as 2:1."""

    def parse(text: str) -> tuple[int, int]:
        match = _PAIR.fullmatch(text)
        if match is None:
            raise InvalidUsage(f"{name}: {text!r}; write source:destination sizes such as 2:1")
        sizes = int(match[1]), int(match[2])
        if 0 in sizes:
            raise InvalidUsage(f"{name}: {text!r} has a size of 0; use 1 or more on either side")
        return sizes

    return parse
