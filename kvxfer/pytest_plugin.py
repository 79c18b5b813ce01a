"""pytest plug-in: a connected sender and receiver for the suites of others.

pytest loads this module in every run in an environment that has kvxfer, so it imports nothing but
pytest; what a fixture needs is imported by the fixture. ``bench/README.md`` shows how to use it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvxfer.sweep.pair import PairFactory, PeerProcesses
    from kvxfer.sweep.pair_benchmark import PairBenchmark, PairFigures


def pytest_configure(config: pytest.Config) -> None:
    """Offer ``kvxfer_benchmark`` in the form that the plug-ins of this run allow."""
    names = ("benchmark", "pytest_benchmark.plugin")  # by entry point; by -p
    found = any(config.pluginmanager.hasplugin(name) for name in names)
    config.pluginmanager.register(
        _WithBenchmark() if found else _WithoutBenchmark(), "kvxfer-benchmark"
    )


@pytest.fixture(scope="session")
def kvxfer_peer_processes() -> "Iterator[PeerProcesses]":
    """The far-side processes of this run, which pairs use one after the other."""
    from kvxfer.sweep.pair import PeerProcesses

    processes = PeerProcesses()
    yield processes
    processes.close()


@pytest.fixture
def kvxfer_pair(kvxfer_peer_processes: "PeerProcesses") -> "Iterator[PairFactory]":
    """Make a connected sender and receiver: ``kvxfer_pair(layout=..., num_blocks=...)``.

    See ``kvxfer.sweep.pair.PairFactory`` for the arguments and ``Pair`` for what it gives. All
    pairs are closed after the test.
    """
    from kvxfer.sweep.pair import PairFactory

    factory = PairFactory(kvxfer_peer_processes)
    yield factory
    factory.close()


class _WithBenchmark:
    def __init__(self) -> None:
        self._figures: list[tuple[str, PairFigures]] = []

    # Names `benchmark` as an argument, since that is how --benchmark-only finds benchmarks.
    @pytest.fixture
    def kvxfer_benchmark(self, request: pytest.FixtureRequest, benchmark: Any) -> "PairBenchmark":
        """Time a pair's transfers, every byte checked: ``kvxfer_benchmark(pair, src, dst)``."""
        from kvxfer.sweep.pair_benchmark import PairBenchmark

        name = request.node.name
        return PairBenchmark(benchmark, lambda figures: self._figures.append((name, figures)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say the rates, for which pytest-benchmark's table has no column."""
        timed = [(name, figures) for name, figures in self._figures if figures.gb_per_s]
        if timed:
            terminalreporter.section("kvxfer: median rates, every byte checked by the receiver")
        for name, figures in timed:
            terminalreporter.write_line(f"{name}: {figures}")


class _WithoutBenchmark:
    @pytest.fixture
    def kvxfer_benchmark(self) -> None:
        """Skips: pytest-benchmark is not here."""
        pytest.skip("kvxfer_benchmark needs pytest-benchmark; pip install '.[bench]'")
