"""Numbers as people write them in options."""

import math
import re
from typing import Final

_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


def decimal(text: str) -> float:
    """A decimal number; NaN where it is none.

    `float` takes more: ``1_000``, digits of other scripts, ``nan`` and ``inf``.
    """
    return float(text) if _DECIMAL.fullmatch(text.strip()) else math.nan
