"""Two readings of a server, with nothing restarted between them."""

import time
from collections.abc import Callable
from typing import Final

from kvxfer.errors import PeerLost
from kvxfer.pd import client
from kvxfer.pd.advise.observation import Observation, observe
from kvxfer.pd.advise.page import Page, parse_page

_PATH: Final = "/metrics"
_READ_S: Final = 10.0
_MOST_RESTARTS: Final = 2


def watch(
    url: str,
    interval_s: float,
    *,
    told: Callable[[str], None] = lambda text: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Observation:
    """Read ``/metrics`` twice and difference the readings.

    A restart between them makes the difference meaningless: the interval is measured again.

    Args:
        url: ``http://HOST:PORT``, with or without ``/metrics``.
        interval_s: between the readings.
        told: what goes on, for a reader who waits.
        sleep: waits so many seconds.

    Raises:
        InvalidUsage: the URL is none.
        NotAvailable: nobody answers, or it is neither the proxy nor vLLM.
        ProtocolMismatch: what answers is no page of metrics.
        PeerLost: the server restarted again and again.
        TransferFailed: it answered with an error.
    """
    base = url.rstrip("/").removesuffix(_PATH)
    earlier, began_s = _read(base)
    for num_restarts in range(_MOST_RESTARTS + 1):
        told(f"watching {base} for {interval_s:g} s")
        sleep(interval_s)
        later, ended_s = _read(base)
        if not later.restarted_since(earlier):
            return observe(earlier, later, ended_s - began_s)
        told(f"{base} restarted meanwhile ({num_restarts + 1}): the interval is measured again")
        earlier, began_s = later, ended_s
    raise PeerLost(
        f"{base} restarted in each of {_MOST_RESTARTS + 1} intervals of {interval_s:g} s; "
        "see why it ends, or give a shorter --interval"
    )


def _read(base: str) -> tuple[Page, float]:
    text = client.get(base, _PATH, _READ_S)
    return parse_page(text), time.monotonic()
