"""What the library says of its arguments, said of the options that a command has instead."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from kvxfer.errors import KvxferError


@contextmanager
def option_words(*, bind: str, ports: str, far: str) -> Iterator[None]:
    """Raise again what is raised within, in the words of a command.

    Args:
        bind: the option for the address that is bound.
        ports: the option for its ports.
        far: what to do where nobody answers.
    """
    words = (
        (r"\b[A-Z]\w+ to (\S+) is not done after (\S+) s", r"\1 gave no answer in \2 s"),
        (r"check that the peer lives, or raise deadline_s", far),
        (r"give \w+ another port, or 0 for a free one", f"choose another by {ports}"),
        (r"\(key=, --key\)", "(--key)"),
        (r"insecure=True \(--insecure\)", "--insecure"),
        (r"\bbind_host\b", bind),
        (r"\badvertise_host\b", "--advertise-host"),
    )
    try:
        yield
    except KvxferError as error:
        text = str(error)
        for pattern, replacement in words:
            text = re.sub(pattern, replacement, text)
        if text == str(error):
            raise
        raise type(error)(text, error.code) from error
