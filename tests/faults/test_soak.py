"""The soak, for a short time; and that it sees what it looks for."""

import numpy as np
import pytest
import soak

from kvxfer.layout import BlockTable
from kvxfer.session import Notice


@pytest.mark.timeout(300)
def test_a_short_soak_finds_nothing() -> None:
    figures = soak.Soak(seed=3, accident_s=1.0).run(200)
    assert figures["problems"] == []
    assert figures["ok"] >= 200


@pytest.fixture
def engine() -> "soak.Engine":
    made = soak.Engine({}, seed=1)
    yield made
    made.receiver.close()
    made.cache.close()


def test_it_sees_a_write_that_comes_too_late(engine: "soak.Engine") -> None:
    load = soak.Load(dict(engine.receiver.addresses), seed=5)
    engine._pages[2, 0, 5] = 0
    load.sender.send("5.0.", [], to=load._to).wait(20.0)
    assert engine.problems == []
    load.sender.send("5.1.7", [7], to=load._to).wait(20.0)
    load.sender.close()
    load.cache.close()
    assert len(engine.problems) == 1
    assert "written after they were given back" in engine.problems[0]


def test_it_sees_a_wrong_byte(engine: "soak.Engine") -> None:
    engine._pages[:, [4, 1]] = soak.pages_of(soak.source(9))[:, [20, 30]]
    notice = Notice("9.0.20-30", range(8), (BlockTable([4, 1]),))
    engine._check(notice)
    assert engine.problems == []
    engine._pages[3, 1, 100] ^= 1
    engine._check(notice)
    assert len(engine.problems) == 1
    assert np.count_nonzero(engine._pages == soak.POISON)
