"""The table of README.md names tests that exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("README.md").read_text()
_NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def missing(table: str) -> list[str]:
    """Tests that a table names and the tree lacks."""
    found = []
    for path, name in _NAMED.findall(table):
        file = TESTS / path
        defined = set()
        if file.exists():
            tree = ast.parse(file.read_text())
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if name not in defined:
            found.append(f"{path}::{name}")
    return found


def test_every_test_that_the_table_names_exists() -> None:
    assert len(_NAMED.findall(TABLE)) > 40
    assert missing(TABLE) == []


def test_the_check_sees_a_test_that_is_gone() -> None:
    assert missing("`faults/test_table.py::test_nothing`") == ["faults/test_table.py::test_nothing"]
    assert missing("`faults/test_absent.py::test_nothing`")
