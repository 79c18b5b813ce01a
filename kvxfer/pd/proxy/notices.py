"""LMCache's notices that the KV of a request has arrived: one message from each prefill rank.

They come over ZeroMQ, PUSH to PULL, as msgpack of a tagged struct (LMCache,
``pd_backend_async.py``). Request ids are random, so nobody else can name a request that waits.
"""

import asyncio

import msgspec
import zmq
import zmq.asyncio

from kvxfer.control.addresses import format_url, resolve_host
from kvxfer.errors import NotAvailable
from kvxfer.pd.proxy.metrics import Metrics

_OPTIONS = {
    zmq.LINGER: 0,
    zmq.MAXMSGSIZE: 64 << 10,
    zmq.RCVHWM: 1024,
    zmq.HANDSHAKE_IVL: 5_000,
}


class ProxyNotif(msgspec.Struct, tag=True):
    """LMCache's name and fields: the last bytes of ``req_id`` have left one rank."""

    req_id: str


class Arrival:
    """The notices of one request; to be closed."""

    def __init__(self, notices: "Notices", request_id: str, num_ranks: int) -> None:
        self._notices, self._id = notices, request_id
        self._num_missing = num_ranks
        self._all = asyncio.Event()

    def count(self) -> None:
        """One more rank is done."""
        self._num_missing -= 1
        if self._num_missing <= 0:
            self._all.set()

    async def wait(self, timeout_s: float) -> bool:
        """Whether all ranks were done in time."""
        try:
            await asyncio.wait_for(self._all.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Expect no more; later ones are counted as late, and nothing else."""
        self._notices.forget(self._id)


class Notices:
    """Takes them, from when it is made until it is closed.

    Raises:
        NotAvailable: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, metrics: Metrics) -> None:
        self._expected: dict[str, Arrival] = {}
        self._metrics = metrics
        self._decoder = msgspec.msgpack.Decoder(ProxyNotif)
        ip = resolve_host(host)
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PULL)
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IPV6, int(ip.version == 6))
        try:
            # ZeroMQ knows a free port by the name *.
            self._socket.bind(format_url(str(ip), port) if port else f"tcp://{ip}:*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise NotAvailable(
                f"cannot bind {ip}:{port} for LMCache's notices: {error}; choose another "
                "--proxy-port",
                error.errno or 0,
            ) from error
        self._task = asyncio.ensure_future(self._receive())

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def expect(self, request_id: str, num_ranks: int) -> Arrival:
        """From now on, count the notices of a request."""
        arrival = self._expected[request_id] = Arrival(self, request_id, num_ranks)
        return arrival

    def forget(self, request_id: str) -> None:
        """Count them no more."""
        self._expected.pop(request_id, None)

    async def close(self) -> None:
        """Listen no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _receive(self) -> None:
        while True:
            # Frame by frame: a message of a million parts is a million small strangers.
            self._metrics.notices.add(self._take(await self._socket.recv()))
            await asyncio.sleep(0)  # a flood must not keep the loop from all else

    def _take(self, frame: bytes) -> str:
        try:
            request_id = self._decoder.decode(frame).req_id
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return "unreadable"
        arrival = self._expected.get(request_id)
        if arrival is None:
            return "unexpected"
        arrival.count()
        return "counted"
