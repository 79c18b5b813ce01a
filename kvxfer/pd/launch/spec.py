"""What a set-up is: its engines, its connector, what engines are told."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, get_args

from kvxfer.errors import InvalidUsage
from kvxfer.pd.client import address_of
from kvxfer.pd.result import Connector, Kind, Reuse, require_name

MAX_ENGINES: Final = 64
_MAX_DEVICE = 1023
_COUNTS: Final = {
    "prefill": "num_prefill",
    "decode": "num_decode",
    "prefill-tp": "prefill_tp",
    "decode-tp": "decode_tp",
}
_ONE_ENGINE: Final = ("aggregated", "prefill_only")

_Fields: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupSpec:
    """One set-up.

    Args:
        name: of its records.
        kind: ``pd``; ``aggregated``, one engine for both; ``prefill_only``, one engine whose
            replies are one token; ``external``, a server that runs already.
        connector: how KV moves between engines of ``pd``; others have none.
        reuse: where KV of prompts is kept for others that begin alike; `Reuse`. Several engines
            have their own prefix caches.
        num_prefill, num_decode: engines; 1 and 0 where there is one engine.
        prefill_tp, decode_tp: tensor-parallel size; of one engine the first.
        devices: indices of GPUs, prefill engines' first; empty = the first ones.
        prefill_args, decode_args: what these engines are told besides; one engine gets the first.
        url: of an external server, or of one of any kind that runs already.

    Raises:
        InvalidUsage: the name is none of a folder, a count is out of range, or fields contradict
            each other.
    """

    name: str
    kind: Kind
    connector: Connector = "none"
    reuse: Reuse = "vllm"
    num_prefill: int = 1
    num_decode: int = 0
    prefill_tp: int = 1
    decode_tp: int = 1
    devices: tuple[int, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    url: str | None = None

    def __post_init__(self) -> None:
        require_name(self.name)
        for field in _COUNTS.values():
            value = getattr(self, field)
            low = 0 if field == "num_decode" else 1
            if not low <= value <= MAX_ENGINES:
                raise InvalidUsage(f"{self.name}: {field} is {value}; use {low} to {MAX_ENGINES}")
        if (self.kind == "pd") != (self.num_decode > 0):
            raise InvalidUsage(
                f"{self.name}: {self.kind} with {self.num_decode} decode engines; pd has one or "
                "more, other kinds none"
            )
        if self.kind in _ONE_ENGINE and self.num_prefill != 1:
            raise InvalidUsage(f"{self.name}: {self.kind} is one engine, not {self.num_prefill}")
        if (self.kind == "pd") != (self.connector != "none"):
            raise InvalidUsage(
                f"{self.name}: {self.kind} with connector {self.connector}; pd takes kvxfer, nixl, "
                "lmcache or lmcache-together, other kinds none"
            )
        if self.reuse != "vllm" and self.kind not in _ONE_ENGINE:
            raise InvalidUsage(
                f"{self.name}: {self.kind} with reuse={self.reuse}; only one engine alone has that"
            )
        if self.kind == "external" and self.url is None:
            raise InvalidUsage(f"{self.name}: an external server needs url=http://HOST:PORT")
        self._check_devices()

    def _check_devices(self) -> None:
        if not self.devices:
            return
        if len(self.devices) != self.num_devices:
            raise InvalidUsage(
                f"{self.name}: {len(self.devices)} devices for {self.num_devices} ranks; name one "
                "for each, those of prefill engines first"
            )
        if not all(0 <= device <= _MAX_DEVICE for device in self.devices):
            raise InvalidUsage(f"{self.name}: devices {self.devices}; use 0 to {_MAX_DEVICE}")

    @property
    def num_devices(self) -> int:
        """Ranks of all engines together."""
        return self.num_prefill * self.prefill_tp + self.num_decode * self.decode_tp


def parse_setup(text: str, common: Mapping[str, tuple[str, ...]] | None = None) -> SetupSpec:
    """Read ``NAME=KIND[,KEY=VALUE...]``.

    Keys: ``tp`` and ``reuse`` of one engine; ``prefill``, ``decode``, ``prefill-tp``,
    ``decode-tp``, ``connector`` of pd; ``devices`` joined by +; ``url`` of a server that runs
    already.

    Args:
        text: such as ``pd=pd,prefill=1,decode=1,devices=0+1`` or ``agg=aggregated,tp=2``.
        common: ``prefill_args`` and ``decode_args``.

    Raises:
        InvalidUsage: an unknown key or kind, or values that cannot be read or do not fit.
    """
    name, equals, rest = text.partition("=")
    kind, *pairs = rest.split(",")
    if not equals or kind not in get_args(Kind):
        raise InvalidUsage(
            f"set-up {text!r}: write NAME=KIND[,KEY=VALUE...], KIND one of "
            f"{', '.join(get_args(Kind))}"
        )
    fields: _Fields = {"name": name, "kind": kind, **(common or {})}
    if kind == "pd":
        fields.update(num_decode=1, connector="kvxfer")
    else:
        fields["decode_args"] = ()
    for pair in pairs:
        fields.update(_read_pair(text, kind, pair))
    return SetupSpec(**fields)  # type: ignore[arg-type]


def _read_pair(setup: str, kind: str, pair: str) -> _Fields:
    key, _, value = pair.partition("=")
    if key == "tp" and kind != "pd":
        return {"prefill_tp": _count(setup, pair, value)}
    if key in _COUNTS and kind == "pd":
        return {_COUNTS[key]: _count(setup, pair, value)}
    if key == "connector" and kind == "pd" and value in get_args(Connector):
        return {"connector": value}
    if key == "reuse" and kind in _ONE_ENGINE and value in get_args(Reuse):
        return {"reuse": value}
    if key == "devices":
        return {"devices": tuple(_count(setup, pair, part) for part in value.split("+"))}
    if key == "url":
        address_of(value)
        return {"url": value.rstrip("/")}
    raise InvalidUsage(
        f"set-up {setup!r}: {pair!r} is not known for {kind}; use tp, "
        f"reuse={'|'.join(get_args(Reuse))} (one engine) or prefill, decode, prefill-tp, "
        f"decode-tp, connector={'|'.join(get_args(Connector))} (pd), "
        "devices=0+1, url=http://HOST:PORT"
    )


def _count(setup: str, pair: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,4}", text):
        raise InvalidUsage(f"set-up {setup!r}: {pair!r} holds no whole number of up to 4 digits")
    return int(text)


def running_at(spec: SetupSpec, url: str) -> SetupSpec:
    """The same set-up, which runs already."""
    return replace(spec, url=url)
