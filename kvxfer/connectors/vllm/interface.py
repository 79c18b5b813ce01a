"""Whether this connector fits vLLM's interface, by its methods and not by its version."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvxfer.errors import NotAvailable

# What is overridden or relied on, with the parameters that vLLM passes by position.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "bind_connector_metadata": ("connector_metadata",),
    "build_connector_meta": ("scheduler_output",),
    "get_block_ids_with_load_errors": (),
    "get_finished": ("finished_req_ids",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "register_kv_caches": ("kv_caches",),
    "request_finished": ("request", "block_ids"),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
    "shutdown": (),
    "start_load_kv": ("forward_context",),
    "update_connector_output": ("connector_output",),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "wait_for_layer_load": ("layer_name",),
    "wait_for_save": (),
}


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the interface.

    Attributes:
        parameters: names of those passed by position, without the first.
        is_abstract: a connector must have its own.
    """

    parameters: tuple[str, ...]
    is_abstract: bool


def describe(base: type) -> dict[str, Method]:
    """The methods of an interface class."""
    return {
        name: Method(_parameters(value), bool(getattr(value, "__isabstractmethod__", False)))
        for name, value in inspect.getmembers(base, inspect.isroutine)
        if not name.startswith("__")
    }


def complaints(found: Mapping[str, Method], implemented: Collection[str]) -> list[str]:
    """What an interface lacks, has otherwise, or asks for beyond ``implemented``."""
    texts = []
    for name, parameters in NEEDED.items():
        method = found.get(name)
        if method is None:
            texts.append(f"it has no {name}")
        elif method.parameters != parameters:
            texts.append(
                f"{name} takes ({', '.join(method.parameters)}), not ({', '.join(parameters)})"
            )
    unknown = [
        name for name, method in found.items() if method.is_abstract and name not in implemented
    ]
    return texts + [f"it asks for {name}, which is unknown here" for name in unknown]


def require_interface(base: type, own: type, version: str) -> None:
    """Check that ``own`` can serve as a connector of this vLLM.

    Raises:
        NotAvailable: it cannot; the message names each method that stands in the way.
    """
    found = complaints(describe(base), vars(own).keys())
    if found:
        raise NotAvailable(
            f"the connector interface of vLLM {version} is not known here: {'; '.join(found)}; use "
            "a vLLM from 0.25 to 0.32, or a newer kvxfer"
        )


def _parameters(function: object) -> tuple[str, ...]:
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in signature.parameters.values() if one.kind in positional]
    return tuple(name for name in names if name not in ("self", "cls"))
