"""The connector interfaces of vLLM's releases, as names and parameters: reads them, and made them.

``python vllm_interfaces.py 0.25.1=FOLDER ...`` writes the file beside this one, from folders into
which the Python files of wheels were unzipped. It takes no text of vLLM but names.
"""

import ast
import json
import sys
from pathlib import Path

from kvxfer.connectors.vllm.interface import Method

FILE = Path(__file__).with_name("vllm_interfaces.json")
_BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
_CLASS = "KVConnectorBase_V1"


def interfaces() -> dict[str, dict[str, Method]]:
    """The methods of the interface, by release."""
    return {
        version: {
            name: Method(tuple(parameters), is_abstract)
            for name, (parameters, is_abstract) in methods.items()
        }
        for version, methods in json.loads(FILE.read_text()).items()
    }


def read_source(source: str) -> dict[str, tuple[list[str], bool]]:
    """Positional parameters of each method, and whether it is abstract, from a ``base.py``."""
    tree = ast.parse(source)
    (found,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == _CLASS
    )
    methods = {}
    for node in found.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        decorators = {ast.unparse(one) for one in node.decorator_list}
        if "property" in decorators:
            continue
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)][1:]
        methods[node.name] = (names, "abstractmethod" in decorators)
    return methods


def main(arguments: list[str]) -> None:
    made = {}
    for argument in arguments:
        version, _, folder = argument.partition("=")
        made[version] = read_source((Path(folder) / _BASE).read_text())
    lines = [
        f'  "{version}": {{\n'
        + ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(method)}" for name, method in methods.items()
        )
        + "\n  }"
        for version, methods in made.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
