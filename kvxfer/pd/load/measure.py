"""One set-up that runs, measured at its points."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvxfer.env import child_environment
from kvxfer.errors import TransferFailed, TransferTimeout
from kvxfer.pd import client
from kvxfer.pd.launch.child import Child
from kvxfer.pd.launch.counters import Counters, read_counters
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.load.plan import LoadPlan, seed_of
from kvxfer.pd.load.warmup import warm_up
from kvxfer.pd.models import ServedModel
from kvxfer.pd.result import PDPoint, bench_path, is_measured, save_point

POINT_S: Final = 3600.0
_IDLE_S = 30.0
_LOOK_S = 0.25
_TAIL_LINES = 15
_CACHED_SHARE = 0.01  # of prompt tokens; below, random prompts met by chance
_REPEATABLE = {"PYTHONHASHSEED": "0"}  # the client seeds a trace's prompts with hashes of text


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server under load.

    Args:
        url: where requests go.
        model: the name it serves under.
        prefill_urls, decode_urls: its engines, where they are known; one engine is in both.
    """

    url: str
    model: str
    prefill_urls: tuple[str, ...] = ()
    decode_urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What points are measured with.

    Args:
        plan: the load.
        site: the Python that has the client.
        model: whose tokenizer the client uses.
        logs: a folder for the client's output.
        point_timeout_s: of a point; a server that stalls for good would hold the run for ever.
        alive: raises where the set-up has lost a program.
    """

    plan: LoadPlan
    site: PythonSite
    model: ServedModel
    logs: Path
    point_timeout_s: float = POINT_S
    alive: Callable[[], None] = lambda: None

    def missing(self, points: list[PDPoint], folder: Path) -> list[PDPoint]:
        """Those that ``folder`` does not hold whole."""
        return [point for point in points if not is_measured(folder, point)]

    def measure(self, target: Target, point: PDPoint, folder: Path) -> PDPoint:
        """Warm up, run the client, keep its JSON and write the point's record.

        Raises:
            NotAvailable, TransferFailed: the server does not answer, or the client failed.
            TransferTimeout: the point took longer than ``point_timeout_s``.
            PeerLost: a program of the set-up ended.
        """
        seed = seed_of(point)
        warm_up(target.url, target.model, point, seed=seed, timeout_s=self.point_timeout_s)
        findings = list(_busy(target))
        before = _read(target)
        words = self.plan.words(point, self.site, self.model, target.url, target.model)
        began_s = time.monotonic()
        self._run_client(words, folder, point)
        done = msgspec.structs.replace(
            point,
            command=words,
            duration_s=time.monotonic() - began_s,
            findings=findings,
        )
        done = _with_counts(done, before, _read(target))
        save_point(folder, done)
        return done

    def _run_client(self, words: list[str], folder: Path, point: PDPoint) -> None:
        result = bench_path(folder, point)
        result.unlink(missing_ok=True)
        kept = ["--save-result", "--save-detailed", "--result-dir", str(folder.resolve())]
        deadline_s = time.monotonic() + self.point_timeout_s
        with Child(
            f"client-{folder.name}-{point.stem}",
            [*words, *kept, "--result-filename", result.name],
            environment=child_environment(
                {}, {**_REPEATABLE, "HF_HUB_OFFLINE": str(int(self.model.is_local))}
            ),
            folder=self.logs,
        ) as child:
            while (status := child.wait(_LOOK_S)) is None:
                self.alive()
                if time.monotonic() > deadline_s:
                    raise TransferTimeout(
                        f"{point.stem}: not done after {self.point_timeout_s:g} s; the server "
                        "stalls, or give more with --point-timeout"
                    )
            if status != 0 or not result.is_file():
                lines = "\n".join(f"  {line}" for line in child.tail(_TAIL_LINES))
                raise TransferFailed(
                    f"{point.stem}: the client ended with status {status}\n{lines}\n"
                    f"  (all of it: {child.log})"
                )


def served_name(url: str, timeout_s: float) -> str:
    """The first model that the server at ``url`` lists.

    Raises:
        InvalidUsage: ``url`` is none.
        NotAvailable, TransferFailed: it does not answer, or lists none.
    """
    text = client.get(url, "/v1/models", timeout_s)
    try:
        name = json.loads(text)["data"][0]["id"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise TransferFailed(f"{url}/v1/models lists no model: {error!r}") from error
    return str(name)


def _read(target: Target) -> tuple[Counters | None, Counters | None]:
    """Of the engines that prefill, and of those that answer."""
    return _sum(target.prefill_urls), _sum(target.decode_urls)


def _sum(urls: tuple[str, ...]) -> Counters | None:
    found = [read_counters(url) for url in urls]
    known = [counters for counters in found if counters is not None]
    return sum(known, Counters()) if known and len(known) == len(found) else None


def _busy(target: Target) -> Iterator[str]:
    """Wait until the engines are idle; says what still runs after half a minute."""
    urls = sorted({*target.prefill_urls, *target.decode_urls})
    deadline_s = time.monotonic() + _IDLE_S
    while (now := _sum(tuple(urls))) is not None and now.num_running + now.num_waiting:
        if time.monotonic() > deadline_s:
            yield (
                f"{now.num_running} requests ran and {now.num_waiting} waited in the engines "
                "before this point began: its figures hold theirs"
            )
            return
        time.sleep(_LOOK_S)


def _with_counts(
    point: PDPoint,
    before: tuple[Counters | None, Counters | None],
    after: tuple[Counters | None, Counters | None],
) -> PDPoint:
    """The record with what the engines counted meanwhile, and what is wrong with that."""
    prefill, decode = (
        None if end is None or start is None else end.since(start)
        for start, end in zip(before, after, strict=True)
    )
    if prefill is None or decode is None:
        return point
    findings = list(point.findings)
    cached = prefill.num_cached_tokens
    if not point.trace and cached > _CACHED_SHARE * point.num_prompts * point.isl:
        findings.append(
            f"{cached} of {point.num_prompts * point.isl} prompt tokens came out of the prefix "
            "cache: TTFT is too small; start engines with --no-enable-prefix-caching"
        )
    preemptions = prefill.num_preemptions + (decode.num_preemptions if decode != prefill else 0)
    if preemptions:
        findings.append(f"{preemptions} preemptions: the KV cache was too small for this load")
    return msgspec.structs.replace(
        point,
        served_prompt_tokens=decode.num_prompt_tokens,
        served_output_tokens=decode.num_output_tokens,
        findings=findings,
    )
