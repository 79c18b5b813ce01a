"""Tests with real vLLM engines on a CPU; skipped where vLLM is not installed.

Engines are joined by the transport that ``auto`` takes, and for tests marked ``every_transport`` by
those that reach other hosts. ``KVXFER_E2E_TRANSPORT`` names one for all tests, and
``KVXFER_E2E_PROMPTS`` says how many random prompts are compared, 30 by default.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_engines import START_S, Pair

from kvxfer import available_transports
from kvxfer.pd.models import find_model

_FAR = ("ucx", "nixl")
_FOLDER = Path(__file__).parent
_LIMIT_S = 2 * START_S  # the first test waits for the engines


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_transport: also with engines joined by ucx and nixl")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        every = metafunc.definition.get_closest_marker("every_transport") is not None
        asked_for = os.environ.get("KVXFER_E2E_TRANSPORT")
        transports = [asked_for] if asked_for else ["auto", *(_FAR if every else ())]
        metafunc.parametrize("pair", transports, indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = "needs vLLM for CPU" if find_spec("vllm") is None else ""
    for item in items:
        if _FOLDER not in item.path.parents:
            continue
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.timeout(_LIMIT_S))
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose output depends on all of its context."""
    return Path(find_model("tiny", tmp_path_factory.mktemp("models")).source)


@pytest.fixture(scope="session")
def num_prompts() -> int:
    return int(os.environ.get("KVXFER_E2E_PROMPTS", "30"))


@pytest.fixture(scope="session")
def pair(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Pair]:
    """Two engines with prefix caches; the first computes prompts in chunks of 512 tokens."""
    transport = str(request.param)
    if transport in _FAR and not (found := available_transports()[transport]).available:
        pytest.skip(f"{transport}: {found.reason}")
    made = Pair(
        tiny,
        tmp_path_factory.mktemp("pair"),
        on_failure="recompute",
        receive_timeout_s=12.0,
        transport=transport,
        prefill=["--max-num-batched-tokens", "512"],
    )
    with made.running():
        yield made
