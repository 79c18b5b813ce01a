"""Many requests between real processes, some of which are killed, stopped or change their mind.

``python tests/faults/soak.py --requests 100000`` runs until so many requests have arrived, and ends
with status 1 where a byte was wrong, a page was written after its request had ended, or anything
was left over. The receiver's engine poisons its blocks when a request is over and looks at them
before it gives them away, so a write that comes too late shows.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
sys.path.insert(0, str(HELPERS))

import leaks  # noqa: E402
import numpy as np  # noqa: E402
from cache_content import shape  # noqa: E402
from free_ports import channel_ports  # noqa: E402

from kvxfer import KVCache, KVLayout, shared_empty  # noqa: E402
from kvxfer.errors import KvxferError  # noqa: E402
from kvxfer.session import (  # noqa: E402
    Deferred,
    Notice,
    Offer,
    ReceiveLimits,
    Receiver,
    Sender,
    SendHandle,
    SendLimits,
)

POISON = 0xEE
NUM_BLOCKS = 32
MAX_OPEN = 16
CACHE = shape(num_blocks=NUM_BLOCKS)
LAYOUT = KVLayout(**CACHE.fields)
SILENCE_S = 60.0  # without any progress: it hangs


def pages_of(memory: Any) -> Any:
    """``[planes, num_blocks, page_bytes]``."""
    return memory.reshape(CACHE.num_planes, NUM_BLOCKS, CACHE.page_bytes)


def source(seed: int) -> Any:
    """What the sender of that seed has in its cache; never the poison."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, POISON, CACHE.array_bytes, dtype=np.uint8)


def say(**fields: Any) -> None:
    """Tell the driver."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Engine:
    """A decode engine that trusts nobody: it owns the blocks, and checks all that arrives."""

    def __init__(self, ports: dict[str, int], seed: int) -> None:
        memory = shared_empty(CACHE.array_bytes)
        memory[:] = POISON
        self._pages = pages_of(memory)
        self._free = deque(range(NUM_BLOCKS))
        self._queue: deque[tuple[Offer, Deferred]] = deque()
        self._lock = threading.RLock()
        self._random = random.Random(seed)
        self._sources: dict[int, Any] = {}
        self.counts = dict.fromkeys(("ok", "failed", "quarantined", "aborted"), 0)
        self.problems: list[str] = []
        self.cache = KVCache(LAYOUT, memory)
        self.receiver = Receiver(
            self.cache,
            transport="shm",
            num_threads=1,
            ports=ports,
            limits=ReceiveLimits(wait_s=5.0, receive_s=5.0, drain_s=0.2),
            on_reserve=self._place,
            on_notice=self._end,
            on_free=lambda request_id, block_ids: self._give_back(block_ids),
        )

    def _place(self, offer: Offer) -> Deferred:
        answer = Deferred()
        with self._lock:
            self._queue.append((offer, answer))
        self._grant()
        if self._random.random() < 0.03:
            self.counts["aborted"] += 1
            threading.Timer(
                self._random.random() * 0.01, self.receiver.abort, [offer.request_id]
            ).start()
        return answer

    def _grant(self) -> None:
        while True:
            with self._lock:
                if not self._queue or self._queue[0][0].num_blocks > len(self._free):
                    return
                offer, answer = self._queue.popleft()
                ids = [self._free.popleft() for _ in range(offer.num_blocks)]
            if (self._pages[:, ids] != POISON).any():
                self.problems.append(f"blocks {ids} were written after they were given back")
            if not answer.grant(ids):
                self._give_back(tuple(ids), poison=False)

    def _end(self, notice: Notice) -> None:
        self.counts["ok" if notice.ok else "failed"] += 1
        if notice.ok:
            self._check(notice)
        if notice.quarantined:
            self.counts["quarantined"] += 1
        else:
            self._give_back(notice.block_ids)

    def _check(self, notice: Notice) -> None:
        seed, _, listed = notice.request_id.split(".")
        if int(seed) not in self._sources:
            self._sources[int(seed)] = pages_of(source(int(seed)))
        sent = [int(one) for one in listed.split("-") if one]
        wanted = self._sources[int(seed)][:, sent]
        if not np.array_equal(self._pages[:, list(notice.block_ids)], wanted):
            self.problems.append(f"wrong bytes in {notice}")

    def _give_back(self, block_ids: tuple[int, ...], *, poison: bool = True) -> None:
        if poison:
            self._pages[:, list(block_ids)] = POISON
        with self._lock:
            self._free.extend(block_ids)
        self._grant()

    @property
    def at_rest(self) -> bool:
        return self.receiver.num_open == 0 and len(self._free) == NUM_BLOCKS

    def report(self) -> None:
        say(
            **self.counts,
            problems=self.problems,
            at_rest=self.at_rest,
            free=len(self._free),
            fds=leaks.num_fds(),
            mappings=leaks.num_segment_mappings(),
        )


def run_engine(ports: dict[str, int], seed: int) -> None:
    """The receiver's process: ends when its input does."""
    engine = Engine(ports, seed)
    say(addresses=dict(engine.receiver.addresses))
    for _ in sys.stdin:
        engine.report()
    engine.receiver.close()


class Load:
    """A prefill engine that sends what comes to its mind, and sometimes thinks better of it."""

    def __init__(self, to: dict[str, str], seed: int) -> None:
        memory = shared_empty(CACHE.array_bytes)
        memory[:] = source(seed)
        self._to, self._seed = to, seed
        self._random = random.Random(seed)
        self.cache = KVCache(LAYOUT, memory)
        limits = SendLimits(connect_s=5.0, reserve_s=8.0, move_s=5.0, commit_s=3.0, abort_s=1.0)
        self.sender = Sender(self.cache, transport="shm", num_threads=1, limits=limits)
        self._open: deque[tuple[SendHandle, list[int]]] = deque()
        self._number = 0
        self.sent = self.failed = 0

    def step(self) -> None:
        """One request more, and a look at those on their way."""
        if len(self._open) < MAX_OPEN:
            self._begin()
        handle, layers = self._open.popleft()
        if layers:
            handle.layer(layers.pop())
        try:
            if handle.poll(0.0001):
                self.sent += 1
                return
        except KvxferError:
            self.failed += 1
            return
        self._open.append((handle, layers))

    def finish(self) -> None:
        """Wait for all that is on its way."""
        while self._open:
            handle, layers = self._open.popleft()
            for layer in layers:
                handle.layer(layer)
            try:
                handle.wait(30.0)
                self.sent += 1
            except KvxferError:
                self.failed += 1

    def _begin(self) -> None:
        blocks = self._random.sample(range(NUM_BLOCKS), self._random.choice((0, 1, 2, 3, 6, 20)))
        name = f"{self._seed}.{self._number}.{'-'.join(map(str, blocks))}"
        self._number += 1
        if self._random.random() < 0.3:
            handle = self.sender.send_layers(name, blocks, to=self._to)
            self._open.append((handle, [1, 0]))
        else:
            self._open.append((self.sender.send(name, blocks, to=self._to), []))
        if self._random.random() < 0.03:
            self._open[-1][0].cancel()


def run_load(to: dict[str, str], seed: int) -> None:
    """A sender's process: sends until its input ends, then brings all to an end."""
    load = Load(to, seed)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        load.step()
    load.finish()
    load.sender.close()
    load.cache.close()
    say(sent=load.sent, failed=load.failed, fds=leaks.num_fds())


class Child:
    """One of the two programs in a process."""

    def __init__(self, role: str, **args: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--role", role, "--args", json.dumps(args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"process {self.process.pid} ended; see its standard error"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hear()

    def stop_for(self, seconds: float) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        heard = self.hear()
        self.process.wait(60.0)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return heard


class Soak:
    """The driver: two senders, one receiver, and accidents."""

    def __init__(self, seed: int, accident_s: float) -> None:
        self._random = random.Random(seed)
        self._accident_s = accident_s
        self._seeds = iter(range(seed * 1_000_000, (seed + 1) * 1_000_000))
        self.totals = dict.fromkeys(("ok", "failed", "quarantined", "aborted"), 0)
        self.accidents = dict.fromkeys(("sender", "receiver", "stop"), 0)
        self.problems: list[str] = []
        self.engine = Child("engine", ports=channel_ports(), seed=seed)
        self.to = self.engine.hear()["addresses"]
        self.loads = [self._new_load() for _ in range(2)]

    def run(self, num_requests: int) -> dict[str, Any]:
        """Until so many requests have arrived; returns the figures."""
        started_s = moved_s = accident_s = time.monotonic()
        arrived, seen = 0, self.engine.ask()
        while arrived < num_requests and not self.problems:
            time.sleep(0.02)
            seen = self.engine.ask()
            self.problems += seen["problems"]
            now_s = time.monotonic()
            if self.totals["ok"] + seen["ok"] > arrived:
                arrived, moved_s = self.totals["ok"] + seen["ok"], now_s
            if now_s - moved_s > SILENCE_S:
                self.problems.append(f"nothing arrived for {SILENCE_S} s: {seen}")
            if now_s - accident_s > self._accident_s:
                self._accident(seen)
                accident_s = time.monotonic()
        ends = [load.end() for load in self.loads]
        self._rest()
        self._add(self.engine.ask())
        self.engine.process.communicate()
        return {
            **self.totals,
            "accidents": self.accidents,
            "seconds": round(time.monotonic() - started_s, 1),
            "sender_fds": [end["fds"] for end in ends],
            "problems": self.problems,
        }

    def _rest(self) -> None:
        """What must be true once nobody sends any more."""
        end_s = time.monotonic() + 30.0
        while not (seen := self.engine.ask())["at_rest"]:
            if time.monotonic() > end_s:
                self.problems.append(f"left over: {seen}")
                return
            time.sleep(0.05)
        # Its sockets, one segment, its board; each of 64 peers may have a watch. Not a request's.
        if seen["fds"] > 80 or seen["mappings"] > 4:
            self.problems.append(f"the receiver holds {seen}")

    def _accident(self, seen: dict[str, Any]) -> None:
        kind = self._random.choices(("sender", "receiver", "stop"), (6, 2, 3))[0]
        self.accidents[kind] += 1
        index = self._random.randrange(2)
        if kind == "stop":
            victim = self._random.choice([self.engine, *self.loads])
            victim.stop_for(self._random.random() * 0.5)
        elif kind == "sender":
            self.loads[index].kill()
            self.loads[index] = self._new_load()
        else:
            self._add(seen)
            self.engine.kill()
            ports = {name: int(url.rpartition(":")[2]) for name, url in self.to.items()}
            self.engine = Child("engine", ports=ports, seed=next(self._seeds))
            self.engine.hear()

    def _add(self, seen: dict[str, Any]) -> None:
        for name in self.totals:
            self.totals[name] += seen[name]
        self.problems += seen["problems"]

    def _new_load(self) -> Child:
        return Child("load", to=self.to, seed=next(self._seeds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--accident-s", type=float, default=1.0)
    parser.add_argument("--role", choices=["engine", "load"])
    parser.add_argument("--args", type=json.loads, default={})
    args = parser.parse_args()
    if args.role:
        {"engine": run_engine, "load": run_load}[args.role](**args.args)
        return 0
    figures = Soak(args.seed, args.accident_s).run(args.requests)
    print(json.dumps(figures, indent=2))
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
