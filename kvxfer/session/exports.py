"""A cache as peers reach it: its regions over each transport that somebody has asked for."""

from collections.abc import Sequence
from contextlib import ExitStack

from kvxfer.errors import NotAvailable
from kvxfer.memory import KVCache
from kvxfer.transport import Export, Transports


class Exports:
    """The regions of one cache by transport. Used by one thread after it was made."""

    def __init__(self, cache: KVCache, transports: Transports) -> None:
        """Export the cache over the first transport.

        Raises:
            NotAvailable: the transport does not work here.
            RegistrationError: the cache's memory cannot be exported.
        """
        self._cache, self._transports = cache, transports
        self._made: dict[str, list[Export]] = {}
        self._over(transports.first.name)

    def choose(self, offered: Sequence[str]) -> tuple[str, list[bytes]]:
        """The first transport of those that a peer offers, and the metadata of the regions.

        Raises:
            NotAvailable: this side has none of them, and why not.
        """
        reasons = []
        for name in offered:
            if name not in self._transports.names:
                continue
            try:
                return name, [export.metadata for export in self._over(name)]
            except NotAvailable as error:
                reasons.append(f"; {error}")
        raise NotAvailable(
            f"this endpoint serves {', '.join(self._transports.names)}; the peer offers "
            f"{', '.join(offered) or 'nothing'}{''.join(reasons)}"
        )

    def close(self) -> None:
        """Withdraw the regions; may be called more than once."""
        for exports in self._made.values():
            for export in exports:
                export.close()

    def _over(self, name: str) -> list[Export]:
        """Over one transport, exported when somebody first asks for it."""
        if name not in self._made:
            transport = self._transports.get(name)
            with ExitStack() as undo:
                exports = []
                for item in self._cache.registrations:
                    exports.append(transport.export(item))
                    undo.callback(exports[-1].close)
                undo.pop_all()
            self._made[name] = exports
        return self._made[name]
