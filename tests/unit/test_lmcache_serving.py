"""Whom the endpoint of a pool lets in, and who is told so; the endpoint is a stand-in."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.lmcache import serving
from kvxfer.connectors.lmcache.serving import serve
from kvxfer.control import SharedKey


@pytest.mark.parametrize(
    ("host", "has_key", "is_open", "advertised"),
    [
        ("127.0.0.1", False, False, None),
        ("127.0.0.1", True, False, None),
        ("0.0.0.0", False, True, "192.0.2.1"),
        ("0.0.0.0", True, False, "192.0.2.1"),
    ],
)
def test_who_lets_anybody_in_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    host: str,
    has_key: bool,
    is_open: bool,
    advertised: str | None,
) -> None:
    monkeypatch.setattr(serving, "Endpoint", lambda cache, **given: SimpleNamespace(**given))
    key_file = str(tmp_path / "key") if has_key else None
    if key_file is not None:
        SharedKey.create(key_file)
    pool: Any = SimpleNamespace(cache=None)
    made: Any = serve(pool, host, key_file=key_file, advertise_host="192.0.2.1")
    assert (made.key is not None, made.insecure) == (has_key, is_open)
    assert made.advertise_host == advertised
    assert (f"whoever reaches {host} may read and write" in caplog.text) == is_open
