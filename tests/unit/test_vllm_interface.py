"""The connector interface of each vLLM release from 0.25 to 0.32, and changes that are refused."""

import ast
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
from vllm_interfaces import interfaces, read_source

import kvxfer.connectors.vllm as package
from kvxfer.connectors.vllm.interface import NEEDED, Method, complaints, describe, require_interface
from kvxfer.errors import NotAvailable

CONNECTOR = Path(str(package.__file__)).with_name("connector.py")
RELEASES = interfaces()


def implemented() -> dict[str, list[str]]:
    """The connector's own methods with their positional parameters, without importing vLLM."""
    tree = ast.parse(CONNECTOR.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and _is_it(node))
    return {
        node.name: [one.arg for one in node.args.args][1:]
        for node in found.body
        if isinstance(node, ast.FunctionDef)
    }


def _is_it(node: ast.ClassDef) -> bool:
    return node.name == "KvxferConnector"


def test_the_ends_and_all_releases_between_are_there() -> None:
    assert next(iter(RELEASES)) == "0.25.1"
    assert list(RELEASES)[-1] == "0.32.0"
    assert {version.rpartition(".")[0] for version in RELEASES} == {
        f"0.{minor}" for minor in range(25, 33)
    }


@pytest.mark.parametrize("version", RELEASES)
def test_the_connector_fits_the_release(version: str) -> None:
    assert complaints(RELEASES[version], implemented()) == []


@pytest.mark.parametrize("version", RELEASES)
def test_every_method_of_ours_takes_what_the_release_passes(version: str) -> None:
    for name, parameters in implemented().items():
        theirs = RELEASES[version].get(name)
        if theirs is not None and name != "build_prom_metrics":
            assert tuple(parameters) == theirs.parameters, name


def test_every_method_that_is_needed_is_our_own_or_inherited_on_purpose() -> None:
    assert set(NEEDED) <= implemented().keys()


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("change", ["gone", "renamed parameter", "more parameters"])
def test_a_change_of_a_method_is_seen(name: str, change: str) -> None:
    release = dict(RELEASES["0.32.0"])
    method = release.pop(name)
    if change == "renamed parameter":
        renamed = ("another", *method.parameters[1:])
        release[name] = Method(renamed, method.is_abstract)
    if change == "more parameters":
        release[name] = Method((*method.parameters, "more"), method.is_abstract)
    (complaint,) = complaints(release, implemented())
    assert name in complaint


def test_an_abstract_method_that_is_unknown_is_refused_by_name() -> None:
    release = RELEASES["0.32.0"] | {"negotiate": Method((), True)}
    assert complaints(release, implemented()) == ["it asks for negotiate, which is unknown here"]


def test_a_source_is_read_as_the_class_is() -> None:
    source = """
class KVConnectorBase_V1(ABC):
    @property
    def role(self): ...
    @abstractmethod
    def wait_for_save(self): ...
    @classmethod
    def build(cls, data=None, *, more=None): ...
    def __init__(self, a): ...
"""
    space: dict[str, Any] = {"ABC": ABC, "abstractmethod": abstractmethod}
    exec(source, space)
    found = describe(space["KVConnectorBase_V1"])
    read = {name: Method(tuple(names), flag) for name, (names, flag) in read_source(source).items()}
    assert {name: found[name] for name in read} == read
    assert read == {"wait_for_save": Method((), True), "build": Method(("data",), False)}


def test_a_vllm_that_is_unknown_is_refused_with_its_version() -> None:
    class Base(ABC):
        @abstractmethod
        def wait_for_save(self) -> None: ...

    class Own(Base):
        def wait_for_save(self) -> None: ...

    with pytest.raises(NotAvailable, match=r"vLLM 9\.9.*it has no get_finished"):
        require_interface(Base, Own, "9.9")
