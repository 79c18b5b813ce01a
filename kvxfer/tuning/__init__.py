"""Tuning profiles: what was measured to be fastest on one machine. See DESIGN.md."""

from kvxfer.tuning.file import (
    default_path,
    read_profile,
    require_profile_path,
    write_profile,
)
from kvxfer.tuning.fingerprint import Fingerprint, cpu_model, difference, differences
from kvxfer.tuning.profile import (
    DEFAULT_RULE,
    ENGINES_OF,
    NO_SECTION,
    SCHEMA,
    Check,
    Memory,
    Place,
    Profile,
    Rule,
    Section,
    Slots,
)

__all__ = [
    "DEFAULT_RULE",
    "ENGINES_OF",
    "NO_SECTION",
    "SCHEMA",
    "Check",
    "Fingerprint",
    "Memory",
    "Place",
    "Profile",
    "Rule",
    "Section",
    "Slots",
    "cpu_model",
    "default_path",
    "difference",
    "differences",
    "read_profile",
    "require_profile_path",
    "write_profile",
]
