"""An event of CUDA for vLLM's connectors on a CPU, where it has always happened already.

`MooncakeStoreConnector` of vLLM 0.32 records one before it saves; a torch without CUDA has none to
give, and the engine would end there. What a CPU was told to compute has been computed.
"""

from typing import Any


class PastEvent:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what the real one takes."""

    def record(self, stream: Any = None) -> None:
        """Nothing is queued."""

    def wait(self, stream: Any = None) -> None:
        """Nothing is waited for."""

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def query(self) -> bool:
        """It has happened."""
        return True


def stand_in() -> None:
    """Put it in the place of an event that cannot be made; changes nothing where there is CUDA."""
    import torch

    if not torch.backends.cuda.is_built():
        torch.cuda.Event = PastEvent
