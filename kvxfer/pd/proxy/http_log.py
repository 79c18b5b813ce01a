"""aiohttp's log: what is no HTTP costs a line there, not a traceback that a stranger can repeat."""

import logging
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError

_TEXT_CHARACTERS: Final = 120

log: Final = logging.getLogger(__name__)
"""For the server; its errors of other kinds keep their tracebacks."""


def _one_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        reason = " ".join(str(error).split())[:_TEXT_CHARACTERS]
        record.msg, record.args = "%s; refused: %s", (record.getMessage(), reason)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


log.addFilter(_one_line)
