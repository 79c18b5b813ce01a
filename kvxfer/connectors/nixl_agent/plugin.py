"""vLLM's way in: a general plug-in, which vLLM calls in each of its processes."""

import importlib
import logging

from kvxfer import env
from kvxfer.errors import NotAvailable


def register() -> None:
    """Put :class:`AcceleratedAgent` under NixlConnector, where ``KVXFER_ACCELERATE_NIXL=1``.

    Without the variable nothing is imported. A NIXL that is not known here stays as it is, with a
    warning that says why.
    """
    if not env.accelerates_nixl():
        return
    from kvxfer.connectors.nixl_agent.installation import install

    # By vLLM's own way to the class: it sets what UCX must find before NIXL is first imported.
    names = importlib.import_module("vllm.distributed.nixl_utils")
    try:
        if getattr(names, "NixlWrapper", None) is None:
            raise NotAvailable("NIXL is not installed; pip install nixl")
        install()
    except NotAvailable as error:
        logging.getLogger(__name__).warning("NIXL is not accelerated: %s", error)
