"""Types of what peers say of memory: their bounds are checked where a message is decoded."""

from typing import Annotated

from msgspec import Meta

Address = Annotated[int, Meta(gt=0, le=(1 << 63) - 1)]
NumBytes = Annotated[int, Meta(gt=0, lt=1 << 46)]
OffsetBytes = Annotated[int, Meta(ge=0, lt=1 << 46)]
Descriptor = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""An open file of the process that says it."""
Device = Annotated[int, Meta(ge=-1, lt=1 << 16)]
"""A CUDA device of the process that says it; -1 for host memory."""
