"""An OpenAI server on this host, asked with plain HTTP: an engine, or the proxy before engines."""

import json
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from waiting import GUARD_S

MODEL = "m"  # the name that all serve under


class Server:
    """One that serves, or will."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, body: Mapping[str, Any], path: str = "/v1/completions") -> Any:
        """The reply to a request; an error of the server is raised."""
        with self.replying(body, path) as reply:
            text = reply.read()
            assert reply.status == 200, text
            return json.loads(text)

    @contextmanager
    def replying(
        self, body: Mapping[str, Any], path: str = "/v1/completions"
    ) -> Iterator[HTTPResponse]:
        """A reply that is not read yet."""
        connection = self.send_only(body, path)
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def send_only(self, body: Mapping[str, Any], path: str = "/v1/completions") -> HTTPConnection:
        """A request whose reply nobody waits for; closing the connection aborts it."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=GUARD_S)
        text = json.dumps({"model": MODEL, **body})
        connection.request("POST", path, text, {"Content-Type": "application/json"})
        return connection

    def metric(self, name: str) -> float:
        """A figure of ``/metrics``, summed over its labels."""
        found = [
            float(line.rpartition(" ")[2])
            for line in self.get("/metrics").splitlines()
            if line.partition("{")[0] == name
        ]
        assert found, f"no metric {name}"
        return sum(found)

    def events(self, body: Mapping[str, Any], path: str = "/v1/completions") -> list[Any]:
        """What a streamed reply holds, without the [DONE] at its end."""
        with self.replying({**body, "stream": True}, path) as reply:
            assert reply.status == 200, reply.read()
            lines = reply.read().decode().split("\n\n")
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
            return str(reply.read().decode())
