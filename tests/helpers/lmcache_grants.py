"""An `Arrivals` over pages and hits in dictionaries, and how senders ask it."""

from collections import Counter
from typing import Any

from kvxfer.connectors.lmcache.arrivals import Arrivals
from kvxfer.connectors.lmcache.wire import AllocRequest, AllocResponse, Asker, CancelNotif
from kvxfer.control import AbortRequest, CommitRequest
from kvxfer.errors import InvalidUsage, PeerLost

LEASE_S = 60.0
UNREADABLE, PLANTED = "?", "!"  # keys that a shelf cannot look for


class Shelf:
    """Pages and hits in two dictionaries."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(range(num_pages))
        self.hits: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.unread_s = 0.0  # how long ago every hit was touched

    def num_free(self) -> int:
        return len(self.free)

    def take(self, request: AllocRequest, index: int) -> int | None:
        if request.dtype == "wrong":
            raise InvalidUsage("no such dtype")
        return self.free.pop(0) if self.free else None

    def give_back(self, page: int) -> None:
        assert page not in self.free
        self.free.append(page)

    def number(self, page: int) -> int:
        return page

    def hold(self, key: str) -> bool:
        if key == UNREADABLE:
            raise InvalidUsage("no key")
        if key == PLANTED:
            raise RuntimeError("planted")
        self.counts[key] += key in self.hits
        return key in self.hits

    def publish(self, key: str, page: int) -> None:
        if self.hits.setdefault(key, page) != page:
            self.give_back(page)
        self.counts[key] += 1

    def drop(self, key: str) -> None:
        self.counts[key] -= 1
        if not self.counts[key]:
            self.give_back(self.hits.pop(key))

    def drop_unread(self, idle_s: float) -> bool:
        if not self.hits or self.unread_s < idle_s:
            return False
        key = next(iter(self.hits))
        self.counts[key] = 1
        self.drop(key)
        return True


class Writers:
    """Which connections are known, and which have ended."""

    incarnation = "receiver"

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.unknown: set[str] = set()
        self.reached: dict[str, int] = {}  # the board
        self.last_words: dict[str, int] = {}  # reached while it is asked whether the sender ended

    def shares_of(self, connection: str) -> tuple[Any, ...]:
        if connection in self.unknown:
            raise PeerLost("unknown")
        return ()

    def has_ended(self, connection: str) -> bool:
        if connection in self.last_words:
            self.reached[connection] = self.last_words[connection]
            self.ended.add(connection)
        return connection in self.ended | self.unknown

    def has_completed(self, connection: str, sequence: int) -> bool:
        return self.reached.get(connection, 0) >= sequence


class Setup:
    def __init__(self, num_pages: int = 8, wait_s: float = 60.0, lease_s: float = LEASE_S) -> None:
        self.shelf, self.writers = Shelf(num_pages), Writers()
        self.arrivals = Arrivals(self.shelf, lease_s=lease_s, wait_s=wait_s).of(self.writers)

    def ask(self, sender: str, req_id: str, keys: str, **more: Any) -> list[AllocResponse]:
        """Ask for a page for each letter; returns the list that the answer comes to."""
        fields: dict[str, Any] = {"is_last_batch": True, "total_chunks": len(keys)} | more
        connected = fields.pop("connected", True)
        asker_wait_s = fields.pop("asker_wait_s", 0.0)
        message = AllocRequest(
            keys=list(keys),
            fmt=1,
            shape=[2, 4, 256, 512],
            dtype=fields.pop("dtype", "bfloat16"),
            last_chunk_toks=256,
            req_id=req_id,
            kvxfer=Asker(connection=sender, wait_s=asker_wait_s) if connected else None,
            **fields,
        )
        answers: list[AllocResponse] = []
        self.arrivals.ask(sender, message, answers.append)
        return answers

    def granted(self, *args: Any, **more: Any) -> AllocResponse:
        (answer,) = self.ask(*args, **more)
        return answer

    def rest(self, seconds: float) -> None:
        """As if so much time had passed since anybody asked."""
        for one in (*self.arrivals._requests.values(), *self.arrivals._waiting):
            one.asked_s -= seconds

    def commit(self, sender: str, answer: AllocResponse, sequence: int = 0) -> None:
        assert answer.kvxfer is not None
        self.arrivals.commit(CommitRequest(answer.kvxfer.id, sender, sequence))

    def abort(self, sender: str, answer: AllocResponse) -> None:
        assert answer.kvxfer is not None
        self.arrivals.abort(AbortRequest(answer.kvxfer.id, sender))

    def cancel(self, sender: str, req_id: str) -> None:
        self.arrivals.cancel(
            sender, CancelNotif(req_id=req_id, keys=[], kvxfer=Asker(connection=sender))
        )
