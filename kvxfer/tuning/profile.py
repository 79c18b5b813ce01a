"""The profile: schema ``kvxfer.tuning/1``. Fields are only ever added within version 1.

Fields that are not known here are those of another kvxfer, and passed over; in a profile of this
one they are misspelt, and refused.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvxfer import __version__
from kvxfer.errors import ProfileRefused
from kvxfer.tuning.fingerprint import Fingerprint

SCHEMA = "kvxfer.tuning/1"
_FAMILY = "kvxfer.tuning/"
_SLOT_STEP_BYTES = 4096
_NO_BOUND = (1 << 63) - 1

Memory: TypeAlias = Literal["shared", "private", "device"]
Place: TypeAlias = Literal["host", "pinned", "device"]
# Ways that a transport can copy; the first leaves the choice to what carries it.
ENGINES_OF: Mapping[str, tuple[str, ...]] = {
    "shm": ("auto", "memcpy", "streaming"),
    "nvlink": ("auto", "bulk", "load_store", "dma"),
    "ucx": ("auto", "direct", "staged"),
    "nixl": ("auto", "direct", "staged"),
}

_Bytes = Annotated[int, Meta(ge=0, le=_NO_BOUND)]
_Name = Annotated[str, Meta(max_length=64)]
_Us = Annotated[float, Meta(gt=0)]


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """Staging slots of a connection on one side.

    Attributes:
        place: where they lie: host memory that threads copy, pinned memory that a GPU copies, or
            the memory of a GPU.
        num_slots: how many.
        slot_bytes: of each; a multiple of 4 KiB.
    """

    place: Place
    num_slots: Annotated[int, Meta(ge=1, le=64)]
    slot_bytes: Annotated[int, Meta(ge=4096, le=64 << 20, multiple_of=_SLOT_STEP_BYTES)]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How copies of certain sizes are run. Bounds are inclusive below and exclusive above.

    Attributes:
        op: put or get.
        min_run_bytes, max_run_bytes: of the plan's runs, see :func:`kvxfer.transport.tuned.key_of`.
        min_total_bytes, max_total_bytes: of the plan.
        engine: of the section's transport; ``auto`` = its own choice.
        num_sms: GPU thread blocks; 0 = the default.
    """

    op: Literal["put", "get"]
    min_run_bytes: _Bytes = 0
    max_run_bytes: _Bytes = _NO_BOUND
    min_total_bytes: _Bytes = 0
    max_total_bytes: _Bytes = _NO_BOUND
    engine: _Name = "auto"
    num_sms: Annotated[int, Meta(ge=0, le=4096)] = 0

    def fits(self, op: str, run_bytes: int, total_bytes: int) -> bool:
        """Whether it holds for such a copy."""
        return (
            self.op == op
            and self.min_run_bytes <= run_bytes < self.max_run_bytes
            and self.min_total_bytes <= total_bytes < self.max_total_bytes
        )


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for one transport and one kind of memory of the peer.

    Attributes:
        transport: its name.
        memory: of the peer; of a transport that maps no memory, ``private`` is the host's.
        num_threads: of copies on CPUs, at most what the process may use; None = the default.
        slots: at most one a place; a place that is not there has the default.
        rules: by size; the first that fits holds.
    """

    transport: _Name
    memory: Memory
    num_threads: Annotated[int, Meta(ge=1, le=256)] | None = None
    slots: Annotated[tuple[Slots, ...], Meta(max_length=3)] = ()
    rules: Annotated[tuple[Rule, ...], Meta(max_length=512)] = ()

    def slots_in(self, place: str) -> Slots | None:
        """The slots of a place; None = the default."""
        return next((slots for slots in self.slots if slots.place == place), None)

    def rule_for(self, op: str, run_bytes: int, total_bytes: int) -> Rule:
        """The rule of a copy, or one that leaves all as it is."""
        for rule in self.rules:
            if rule.fits(op, run_bytes, total_bytes):
                return rule
        return DEFAULT_RULE

    @property
    def is_empty(self) -> bool:
        """Whether it leaves all as it is."""
        return self.num_threads is None and not self.slots and not self.rules


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the validation: default and profile, measured in turns.

    Attributes:
        transport, memory, op: of the section.
        src_tp, dst_tp: tensor-parallel sizes; 1 and 1 for a pair of processes.
        run_bytes, total_bytes: of the request.
        default_us, profile_us: median latencies of one repeat, the one of median gain.
        gain: 0.25 = a quarter less time, in that repeat.
        noise: what is no difference, in the same unit.
        verdict: ``gain``, ``same``, ``slower``, or ``taken back``: what made the difference is not
            in the profile, because it was slower here or elsewhere, or no faster.
    """

    transport: _Name
    memory: Memory
    op: Literal["put", "get"]
    src_tp: Annotated[int, Meta(ge=1)] = 1
    dst_tp: Annotated[int, Meta(ge=1)] = 1
    run_bytes: _Bytes
    total_bytes: _Bytes
    default_us: _Us
    profile_us: _Us
    gain: float
    noise: Annotated[float, Meta(ge=0)]
    verdict: Literal["gain", "same", "slower", "taken back"]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A whole profile.

    Attributes:
        schema: ``kvxfer.tuning/1``.
        created: date and time, UTC.
        command: what measured it.
        fingerprint: of the machine.
        sections: one a transport and memory.
        order: transports by measured speed, fastest first, of ``host`` and ``device`` memory.
        checks: the validation.
    """

    schema: str
    created: Annotated[str, Meta(max_length=64)]
    command: Annotated[str, Meta(max_length=4096)] = ""
    fingerprint: Fingerprint
    sections: Annotated[tuple[Section, ...], Meta(max_length=32)] = ()
    order: Annotated[
        Mapping[Literal["host", "device"], Annotated[tuple[_Name, ...], Meta(max_length=16)]],
        Meta(max_length=2),
    ] = {}
    checks: Annotated[tuple[Check, ...], Meta(max_length=1024)] = ()

    def section(self, transport: str, memory: str) -> Section:
        """The one of a transport and memory, or an empty one."""
        for section in self.sections:
            if (section.transport, section.memory) == (transport, memory):
                return section
        return NO_SECTION

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return not self.order and all(section.is_empty for section in self.sections)


class _Header(msgspec.Struct):
    schema: str


DEFAULT_RULE = Rule(op="put")
NO_SECTION = Section(transport="", memory="private")


def decode(data: bytes) -> Profile:
    """A profile from a file's bytes.

    Raises:
        ProfileRefused: it is none, of another version, or says what no transport can do.
    """
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema != SCHEMA:
            raise ProfileRefused(f"its schema is {_named(schema)}; this kvxfer reads {SCHEMA}")
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileRefused(f"it is no profile: {error}") from error
    _require_once("section", [f"{one.transport}, {one.memory}" for one in profile.sections])
    for section in profile.sections:
        _require_known(section)
        _require_possible(section)
    if profile.fingerprint.kvxfer == __version__:
        _require_spelt(msgspec.json.decode(data), msgspec.to_builtins(profile))
    return profile


def _named(schema: str) -> str:
    is_other = schema.startswith(_FAMILY)
    return f"{schema[:40]!r}, of another version of kvxfer" if is_other else repr(schema[:40])


def _require_known(section: Section) -> None:
    engines = ENGINES_OF.get(section.transport)
    if engines is None:
        raise ProfileRefused(f"it has a section of the transport {section.transport!r}")
    for rule in section.rules:
        if rule.engine not in engines:
            raise ProfileRefused(
                f"it has the engine {rule.engine!r} over {section.transport}, which has "
                f"{', '.join(engines)}"
            )


def _require_possible(section: Section) -> None:
    where = f"{section.transport}, {section.memory}"
    _require_once(f"slots of {where}, place", [slots.place for slots in section.slots])
    for number, rule in enumerate(section.rules, 1):
        for name in ("run_bytes", "total_bytes"):
            least, most = getattr(rule, f"min_{name}"), getattr(rule, f"max_{name}")
            if least >= most:
                raise ProfileRefused(
                    f"rule {number} of {where} has min_{name} {least} and max_{name} {most}; the "
                    "second must be larger"
                )


def _require_once(what: str, names: list[str]) -> None:
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise ProfileRefused(f"it has two of {what}: {twice}; leave one")


def _require_spelt(raw: object, known: object) -> None:
    """Refuse keys of a file that are none of a profile."""
    unknown = next(_unknown(raw, known, "$"), None)
    if unknown is not None:
        raise ProfileRefused(f"it has {unknown}, which no profile has; correct it, or take it out")


def _unknown(raw: object, known: object, place: str) -> Iterator[str]:
    if isinstance(raw, dict) and isinstance(known, dict):
        for key, value in raw.items():
            if key not in known:
                yield f"{place}.{key[:80]}"
            else:
                yield from _unknown(value, known[key], f"{place}.{key}")
    elif isinstance(raw, list) and isinstance(known, tuple):
        for at, (one, other) in enumerate(zip(raw, known, strict=True)):
            yield from _unknown(one, other, f"{place}[{at}]")


def encode(profile: Profile) -> str:
    """As the file has it."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2).decode() + "\n"
