"""Failures as messages: the server's `KvxferError` is raised again at the caller."""

from kvxfer import errors
from kvxfer.control.framing import encode
from kvxfer.control.messages import MAX_ERROR_CHARS, ErrorReply
from kvxfer.errors import KvxferError


def error_frames(error: KvxferError) -> list[bytes]:
    """The frames of the answer that stands for ``error``."""
    kind = type(error)
    # The peer can only raise what it knows: a subclass from elsewhere travels as its nearest base.
    name = next(base.__name__ for base in kind.__mro__ if vars(errors).get(base.__name__) is base)
    code = error.code if -(1 << 31) <= error.code < 1 << 31 else 0
    # A lone surrogate, as in some file names, has no UTF-8.
    text = str(error).encode("utf-8", "replace").decode("utf-8")
    return encode(ErrorReply(name, text[:MAX_ERROR_CHARS], code))


def error_of(reply: ErrorReply, address: str) -> KvxferError:
    """The error that the server at ``address`` answered with."""
    kind = vars(errors).get(reply.kind)
    if isinstance(kind, type) and issubclass(kind, KvxferError):
        return kind(f"{address}: {reply.message}", reply.code)
    return KvxferError(f"{address}: {reply.kind}: {reply.message}", reply.code)
