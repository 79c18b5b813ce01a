"""What a channel must know that LMCache's factory of channels does not pass on.

A back end says it around its own construction, in which LMCache makes the channel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from kvxfer.connectors.lmcache.options import Options
from kvxfer.connectors.lmcache.wire import Facts
from kvxfer.session.requests import Requests, Writers
from kvxfer.transport import After


@dataclass(frozen=True, slots=True)
class Setting:
    """Of one back end.

    Attributes:
        options: its settings.
        facts: what peers must have in common with it; None where it does not say.
        requests: answers the senders of a receiver.
        written: the stream on which the pages' content is made, whose work must be waited for.
    """

    options: Options = field(default_factory=Options)
    facts: Callable[[], Facts | None] = lambda: None
    requests: Callable[[Writers], Requests] | None = None
    written: Callable[[], After] = lambda: None


_CURRENT: ContextVar[Setting | None] = ContextVar("kvxfer.lmcache", default=None)


def current() -> Setting:
    """That of the back end under construction."""
    return _CURRENT.get() or Setting()


@contextmanager
def constructing(setting: Setting) -> Iterator[None]:
    """Channels that are made in this block get ``setting``."""
    token = _CURRENT.set(setting)
    try:
        yield
    finally:
        _CURRENT.reset(token)
