"""What `arrivals` needs of a back end; `shelf.BackendShelf` has it of LMCache's."""

from typing import Any, Protocol

from kvxfer.connectors.lmcache.wire import AllocRequest


class Shelf(Protocol):
    """The back end's pages and the keys that are hits. ``key`` is as it is on the wire."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""

    def num_free(self) -> int:
        """Pages that nobody has."""

    def take(self, request: AllocRequest, index: int) -> Any:
        """A page for the request's key ``index``, or None; raises InvalidUsage if it cannot fit."""

    def give_back(self, page: Any) -> None:
        """A page that was never published."""

    def number(self, page: Any) -> int:
        """The number of a page."""

    def hold(self, key: str) -> bool:
        """Count one more request that fetches ``key``; False if no hit, InvalidUsage if no key."""

    def publish(self, key: str, page: Any) -> None:
        """Make ``key`` a hit. Where it is one, count one more request, and give ``page`` back."""

    def drop(self, key: str) -> None:
        """Count one request less that fetches ``key``."""

    def drop_unread(self, idle_s: float) -> bool:
        """Forget the key that was touched longest ago, if that is ``idle_s``; False if none."""
