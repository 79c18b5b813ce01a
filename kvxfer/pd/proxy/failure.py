"""What went wrong with a request, as a client is told: a status and a body in OpenAI's shape."""

from typing import Any

import msgspec

from kvxfer.errors import KvxferError
from kvxfer.pd.proxy.engine import Engine

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


class Failure(KvxferError):
    """A request that ends with an error of the proxy's own; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LegFailed(Failure):
    """An engine took a leg of a request and did not answer it: it died, hung or sent nonsense."""

    def __init__(self, engine: Engine, why: str, status: int = 502) -> None:
        super().__init__(status, f"{engine}: {why}")
        self.engine = engine


class Unreachable(LegFailed):
    """An engine took no connection, so that it has seen nothing of the request."""


def error_object(status: int, message: str) -> dict[str, Any]:
    """The body of an error, with the fields of vLLM's."""
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_body(status: int, message: str) -> bytes:
    """`error_object` as JSON."""
    return msgspec.json.encode(error_object(status, message))
