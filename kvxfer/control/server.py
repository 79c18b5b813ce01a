"""A server of control channels with one thread."""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import zmq

from kvxfer.closing import Closing
from kvxfer.control import _sockets
from kvxfer.control._gate import Gate
from kvxfer.control._served import Handlers, OnGone, ServedChannel
from kvxfer.control._wake import Wake
from kvxfer.control.addresses import Resolved, advertised_host, format_url, resolve_host
from kvxfer.control.guard import require_guard
from kvxfer.control.key import SharedKey
from kvxfer.control.ports import checked_ports

__all__ = ["ControlServer", "Handlers"]

_log = logging.getLogger(__name__)
_CLOSE_S = 1.5
_PAUSE_S = 0.1
_AGAIN_S = 1.0


class ControlServer(Closing):
    """Serves channels, each on its own TCP ports, from one background thread.

    Handlers run on that thread one after another: they must be quick and must not call back into
    the server's own channels. One that cannot answer yet returns a `DeferredReply`. A `KvxferError`
    that a handler raises is raised again at the caller.
    """

    def __init__(
        self,
        channels: Mapping[str, Handlers],
        *,
        bind_host: str = "127.0.0.1",
        ports: Mapping[str, int | Sequence[int]] | None = None,
        advertise_host: str | None = None,
        key: SharedKey | None = None,
        insecure: bool = False,
        on_gone: OnGone | None = None,
        on_time: Callable[[float], float] | None = None,
    ) -> None:
        """Bind and start to serve.

        Args:
            channels: for each channel, the message types it takes and their handlers.
            bind_host: one address of this host, or a wildcard together with ``advertise_host``.
            ports: port of each channel; 0 or absent takes a free one. Several ports of one channel
                are aliases: whichever is dialled, the same handlers answer.
            advertise_host: the host in `addresses`, where peers must dial another than is bound.
            key: admit only clients that hold it.
            insecure: without a key, bind beyond loopback all the same.
            on_gone: called with the channel and an incarnation when the last connection that has
                spoken for that incarnation on that channel has ended, however it ended; on the
                server's thread. A client that reconnects has to speak before it counts again.
            on_time: called on the server's thread after each turn of its loop with
                ``time.monotonic()``; returns when it is to be called next at the latest.

        Raises:
            InvalidUsage: no channel, unusable types or ports, equal ports, a wildcard host, or
                neither ``key`` nor ``insecure`` where others than this host reach the ports.
            NotAvailable: a port is in use, the host is not of this machine, libzmq is too old.
        """
        _sockets.require_libzmq()
        wanted = checked_ports(channels, ports or {})
        ip = resolve_host(bind_host)
        host = advertised_host(ip, advertise_host)
        require_guard(ip, key, insecure)
        self._channels = [
            ServedChannel(name, handlers, post=self._post, on_gone=on_gone)
            for name, handlers in channels.items()
        ]
        self._context: _sockets.Context = zmq.Context()
        self._urls: dict[str, tuple[str, ...]] = {}
        try:
            self._gate = None if key is None else Gate(self._context, key)
            for channel in self._channels:
                places = [Resolved(ip, port) for port in wanted[channel.name]]
                bound = channel.open(self._context, places, key)
                self._urls[channel.name] = tuple(format_url(host, port) for port in bound)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._pid = os.getpid()
        self._wake = Wake()
        self._posted: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._on_time = on_time
        self._due_s = math.inf
        self._thread = threading.Thread(target=self._run, name="kvxfer-control", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> Mapping[str, str]:
        """For each channel the address that peers dial, such as ``tcp://127.0.0.1:4001``."""
        return MappingProxyType({name: urls[0] for name, urls in self._urls.items()})

    @property
    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """For each channel all its addresses, in the order of its ports."""
        return MappingProxyType(self._urls)

    @property
    def dropped(self) -> dict[str, int]:
        """For each channel the foreign messages that were dropped without an answer."""
        return {channel.name: channel.dropped for channel in self._channels}

    @property
    def refused(self) -> dict[str, int]:
        """For each channel the messages of another version or schema that were refused."""
        return {channel.name: channel.refused for channel in self._channels}

    @property
    def undelivered(self) -> dict[str, int]:
        """For each channel the answers whose callers were gone or did not read."""
        return {channel.name: channel.undelivered for channel in self._channels}

    @property
    def num_pending(self) -> dict[str, int]:
        """For each channel the deferred answers that are still owed."""
        return {channel.name: len(channel.pending) for channel in self._channels}

    @property
    def num_unadmitted(self) -> int:
        """Callers that knew the public half of the key only and were refused; 0 without a key."""
        return self._gate.refused if self._gate is not None else 0

    def close(self) -> None:
        """Stop serving and free the ports; bounded, and may be called again, from any thread.

        An answer that is still on its way out may be lost, as with a server that dies.
        """
        if os.getpid() != self._pid:
            return  # a forked child: the thread and the sockets are the parent's
        self._stopping = True
        self._wake.ring()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.error("a handler has not returned within %.1f s; its thread is left", _CLOSE_S)

    def _post(self, work: Callable[[], None]) -> None:
        """Have the server's thread do ``work`` next; from any thread."""
        self._posted.append(work)
        self._wake.ring()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _log.exception("the control thread ends; %s are served no more", self._urls)
        finally:
            self._wake.close()
            for channel in self._channels:
                channel.abandon_all()
            self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        work: dict[object, Callable[[], None]] = {self._wake.fileno(): self._do_posted}
        if self._gate is not None:
            work[self._gate.socket] = self._gate.serve_waiting
        for channel in self._channels:
            work[channel.socket] = channel.serve_waiting
            work[channel.callers.monitor.socket] = channel.callers.note_events
        for source in work:
            poller.register(source, zmq.POLLIN)
        while not self._stopping:
            for source, _ in poller.poll(self._left_ms()):
                self._guarded(work[source])
            self._guarded(self._keep_time)

    def _keep_time(self) -> None:
        now_s = time.monotonic()
        self._due_s = now_s + _AGAIN_S  # where what follows fails
        for channel in self._channels:
            channel.keep_time(now_s)
        self._due_s = math.inf if self._on_time is None else self._on_time(now_s)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do ``step``; where it fails, as without a free file descriptor, go on serving."""
        try:
            step()
        except zmq.ContextTerminated:
            raise
        except Exception:
            _log.exception("a step of the control thread failed; %s are served on", self._urls)
            time.sleep(_PAUSE_S)  # what failed may be due again at once

    def _left_ms(self) -> int | None:
        due_s = min(self._due_s, *(channel.next_due_s for channel in self._channels))
        if due_s == math.inf:
            return None
        return math.ceil(max(0.0, due_s - time.monotonic()) * 1000)

    def _do_posted(self) -> None:
        self._wake.clear()
        while self._posted:
            self._guarded(self._posted.popleft())
