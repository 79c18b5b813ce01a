"""NIXL's agent, with transfers inside one host going through the paged copy.

:class:`AcceleratedAgent` is a subclass of NIXL's own; :func:`install` puts it in its place in a
process. Importing this package imports neither NIXL nor anything else that is heavy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.connectors.nixl_agent.agent import AcceleratedAgent
    from kvxfer.connectors.nixl_agent.installation import install

__all__ = ["AcceleratedAgent", "install"]


def __getattr__(name: str) -> Any:
    if name == "AcceleratedAgent":
        from kvxfer.connectors.nixl_agent.agent import AcceleratedAgent

        return AcceleratedAgent
    if name == "install":
        from kvxfer.connectors.nixl_agent.installation import install

        return install
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
