"""How many files this process may have open, for errors that a low limit explains."""

import resource

_FEW = 256  # sockets of a few peers, their monitors and shared segments; 1024 is the usual default


def limit_text() -> str:
    """The limit and the remedy."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"RLIMIT_NOFILE is {limit}; raise it (ulimit -n), or close what is not needed"


def low_limit_hint() -> str:
    """For the error of a child that has ended: the limit where it is a low one, else nothing."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not 0 <= limit < _FEW:  # -1: there is none
        return ""
    return f"; it may open few files: {limit_text()}"
