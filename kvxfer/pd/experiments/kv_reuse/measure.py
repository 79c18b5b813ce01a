"""One set-up, asked every prompt of the sweep, one at a time.

What is to be there of a prompt is sent before it, as a prompt of its own. With a store, the
engine's own prefix cache is dropped then, so that hits can only come from the store. A store that
reads from a far one is asked after each prompt what it read.
"""

import json
import time
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvxfer.connectors.vllm.timings import Event, read_events
from kvxfer.errors import NotAvailable, TransferTimeout
from kvxfer.pd import client
from kvxfer.pd.experiments.kv_reuse.cases import Case, Sweep
from kvxfer.pd.experiments.kv_reuse.parts import parts_of
from kvxfer.pd.experiments.kv_reuse.record import Asked, ReuseRun
from kvxfer.pd.launch.counters import Counters, read_counters
from kvxfer.pd.launch.engines import Program
from kvxfer.pd.launch.stack import Stack
from kvxfer.pd.launch.stores import STORES, TIMINGS, Held
from kvxfer.pd.result import PDSetup

_LOOK_S: Final = 0.1
_LOOKS_ALIKE: Final = 3
"""So often a store says the same before it is taken to have all that it was sent."""
_STORE_S: Final = 60.0
_DROP_S: Final = 30.0
_COUNT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Asks a running set-up.

    Args:
        stack: it.
        setup: its record.
        timeout_s: of each request.
    """

    stack: Stack
    setup: PDSetup
    timeout_s: float

    def run(self, sweep: Sweep) -> ReuseRun:
        """Ask all of it.

        Raises:
            NotAvailable, TransferFailed: the engine or its store does not answer.
            TransferTimeout: the store does not take what it is sent, or the engine's prefix cache
                cannot be dropped.
            PeerLost: a program of the set-up ended.
        """
        for case in sweep.warm_up():
            self._ask(case, sweep)
        sent = [(case, *self._ask(case, sweep)) for case in sweep.cases()]
        noted, token_bytes = self._noted()
        asked = [self._with_parts(case, at_s, one, noted) for case, at_s, one in sent]
        return ReuseRun(
            setup=self.setup,
            isl=sweep.isl,
            osl=sweep.osl,
            token_bytes=token_bytes * self.setup.prefill_tp,
            asked=asked,
        )

    def _ask(self, case: Case, sweep: Sweep) -> tuple[float, Asked]:
        """When it was sent, and what came back."""
        self.stack.require_alive()
        store = self.stack.store
        held = self._settled(store) if store is not None else None  # what was asked last is kept
        if case.hit_tokens and self.setup.reuse != "none":
            body = self._body(case.prefix, 1)
            client.post_all(self.stack.url, "/v1/completions", [body], self.timeout_s)
            if store is not None:
                held = self._settled(store, held)
                self._drop_own_cache()
        before = self._counters()
        sent_s = time.monotonic()
        body = self._body(case.prompt, sweep.osl) | {"request_id": case.name}
        answer = client.complete(self.stack.url, body, self.timeout_s)
        counted = self._counted_since(before, len(case.prompt))
        num_far, num_near = self._looked_up_since(held)
        return sent_s, Asked(
            hit_tokens=case.hit_tokens,
            index=case.index,
            ttft_s=answer.ttft_s,
            text=answer.text,
            cached_tokens=counted.num_cached_tokens,
            loaded_tokens=counted.num_loaded_tokens,
            far_chunks=num_far,
            near_chunks=num_near,
        )

    def _settled(self, store: Program, before: Held | None = None) -> Held:
        """What the store holds, once it is not what it was before and nothing more comes."""
        deadline_s = time.monotonic() + _STORE_S
        looks: list[Held] = []
        while True:
            self.stack.require_alive()  # a far store that ended takes nothing more
            looks.append(self._held(store))
            last = looks[-_LOOKS_ALIKE:]
            alike = len(last) == _LOOKS_ALIKE and len(set(last)) == 1
            if alike and last[0] != before and not last[0].is_busy:
                return last[0]
            if time.monotonic() > deadline_s:
                raise TransferTimeout(
                    f"{self.setup.reuse} is not done with a new prompt after {_STORE_S:g} s, or "
                    "does not take it; see the logs of store and engine (--logs)"
                )
            time.sleep(_LOOK_S)

    def _held(self, program: Program) -> Held:
        store = STORES[self.setup.reuse]
        found = store.held(client.get(program.url, store.page, _COUNT_S))
        if found is None:
            raise NotAvailable(
                f"{program.url}{store.page} does not say how much {self.setup.reuse} holds; this "
                "release of it is not known here"
            )
        return found

    def _looked_up_since(self, before: Held | None) -> tuple[int, int]:
        """Chunks that the store read from a far one, and those that it had."""
        if before is None or self.stack.store is None:
            return 0, 0
        found = self._held(self.stack.store)
        return found.num_far - before.num_far, found.num_near - before.num_near

    def _drop_own_cache(self) -> None:
        """Of the engine; it cannot while a request's KV is still being saved."""
        deadline_s = time.monotonic() + _DROP_S
        while not _says_done(client.post(self.stack.url, "/reset_prefix_cache", _COUNT_S)):
            if time.monotonic() > deadline_s:
                raise TransferTimeout(
                    f"the engine does not give up its prefix cache within {_DROP_S:g} s"
                )
            time.sleep(_LOOK_S)

    def _counters(self) -> Counters:
        found = read_counters(self.stack.engines[0].url)
        if found is None:
            raise NotAvailable("the engine shows no counters, so that hits cannot be checked")
        return found

    def _counted_since(self, before: Counters, num_tokens: int) -> Counters:
        """What the engine counted, once it has counted the prompt."""
        deadline_s = time.monotonic() + _COUNT_S
        while (found := self._counters().since(before)).num_prompt_tokens < num_tokens:
            if time.monotonic() > deadline_s:
                raise NotAvailable(f"the engine counted no prompt within {_COUNT_S:g} s")
            time.sleep(_LOOK_S / 10)
        return found

    def _body(self, prompt: tuple[int, ...], osl: int) -> dict[str, Any]:
        return {
            "model": self.setup.model,
            "prompt": list(prompt),
            "max_tokens": osl,
            "temperature": 0,
            "ignore_eos": True,
        }

    def _noted(self) -> tuple[list[Event], int]:
        """What the connector wrote, and KV bytes of a token in a rank."""
        path = self.stack.folder / TIMINGS
        if self.stack.store is None or not path.exists():
            return [], 0
        events = list(read_events(path))
        return events, max((event.token_bytes for event in events), default=0)

    def _with_parts(self, case: Case, sent_s: float, one: Asked, noted: list[Event]) -> Asked:
        if self.stack.store is None:
            return one
        events = (event for event in noted if case.name in event.request)
        parts = parts_of(events, sent_s, one.ttft_s)
        if isinstance(parts, str):
            return msgspec.structs.replace(one, no_parts=parts)
        return msgspec.structs.replace(one, parts=parts)


def _says_done(text: str) -> bool:
    """Whether an engine has dropped its cache; older releases answer nothing."""
    try:
        answer = json.loads(text) if text.strip() else None
    except ValueError:
        return True
    return not isinstance(answer, dict) or bool(answer.get("success", True))
