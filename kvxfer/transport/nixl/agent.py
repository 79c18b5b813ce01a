"""One NIXL agent of this process: its memory, the agents that it knows, and what they say."""

import atexit
import hashlib
import os
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from kvxfer import _core
from kvxfer.errors import NotAvailable, PeerLost, ProtocolMismatch, RegistrationError
from kvxfer.transport.nixl.api import load_api
from kvxfer.transport.nixl.memory import HOST_DEVICE, Range, Rows, segment_of
from kvxfer.transport.nixl.prepared import Prepared, lost
from kvxfer.transport.nixl.waiting import Mailbox
from kvxfer.transport.nixl.wire import (
    ID_BYTES,
    MAX_METADATA_BYTES,
    Kind,
    Message,
    decode,
)

_OWN = "NIXL_INIT_AGENT"
_PART_S = 0.05
_PART_ROUNDS = 20
_EXIT_S = 5.0
_all: "weakref.WeakSet[Agent]" = weakref.WeakSet()


class Agent:
    """An agent with one back end. All methods may be called from several threads.

    NIXL's own progress thread spins even when idle, so that whoever waits calls :meth:`pump`.
    """

    def __init__(self, backend: str, params: Mapping[str, str], device: int = HOST_DEVICE) -> None:
        """Start it.

        Args:
            backend: the plug-in.
            params: of it.
            device: the CUDA device whose memory is moved; -1 where it is host memory alone.

        Raises:
            NotAvailable: NIXL has no such plug-in, or it does not start.
        """
        api = load_api()
        self.name = f"kvxfer-{uuid.uuid4().hex}"
        self.backend, self.device = backend, device
        self.mail = Mailbox()  # of no connection that was posted from here
        self._api = api
        self._lock = threading.RLock()
        # UCX offers no path to a GPU's memory to a thread that has no context of it.
        self._context = None if device < 0 else _core.DeviceContext(device)
        self._boxes: dict[bytes, Mailbox] = {}
        self._known: dict[str, dict[bytes, bytes]] = {}  # metadata by its digest
        self._num_links: Counter[str] = Counter()
        self._memory: dict[Range, tuple[Any, int]] = {}
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._pid = os.getpid()
        self._is_barred = False
        _all.add(self)
        self._agent: Any = None
        with self.entered():
            self._agent = self._start(api, config, params)

    def _start(self, api: Any, config: Any, params: Mapping[str, str]) -> Any:
        backend = self.backend
        try:
            agent = api.nixl_agent(self.name, config)
            if backend not in agent.get_plugin_list():
                raise NotAvailable(
                    f"NIXL has no plug-in {backend!r} here; it has "
                    f"{', '.join(agent.get_plugin_list())}"
                )
            agent.create_backend(backend, dict(params))
        except NotAvailable:
            raise
        except Exception as error:  # NIXL's bindings have exceptions of their own
            raise NotAvailable(f"NIXL does not start {backend} with {params}: {error}") from error
        return agent

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's agent, which it must not touch."""
        return os.getpid() != self._pid

    @property
    def _is_off(self) -> bool:
        return self._is_barred or self.is_inherited

    @contextmanager
    def entered(self) -> Iterator[Any]:
        """NIXL's agent, under the lock of this one and in the GPU's context.

        Raises:
            PeerLost: it is of a parent process, or this process ends.
        """
        if self.is_inherited:  # its lock may be held for ever
            raise PeerLost("this NIXL agent is that of the process that this one was forked off")
        with self._lock:
            if self._is_barred:
                raise PeerLost("this process ends, and NIXL moves nothing more in it")
            if self._context is None:
                yield self._agent
                return
            self._context.enter()
            try:
                yield self._agent
            finally:
                self._context.leave()

    # Memory.

    def register(self, memory: Range) -> None:
        """Let transfers use a range of memory; as often as :meth:`deregister` ends it.

        Raises:
            RegistrationError: NIXL refuses it.
        """
        row = (memory.address, memory.num_bytes, max(memory.device, 0), "")
        with self.entered():
            listed, count = self._memory.get(memory, (None, 0))
            if count == 0:
                try:
                    listed = self._agent.register_memory([row], segment_of(memory.device))
                except Exception as error:
                    raise RegistrationError(
                        f"NIXL does not register {memory.num_bytes} bytes at {memory.address:#x}: "
                        f"{error}"
                    ) from error
            self._memory[memory] = (listed, count + 1)

    def deregister(self, memory: Range) -> None:
        """End one :meth:`register`.

        Raises:
            RegistrationError: NIXL does not give it back.
        """
        if self._is_off:
            return
        with self.entered():
            listed, count = self._memory.pop(memory)
            if count > 1:
                self._memory[memory] = (listed, count - 1)
                return
            try:
                self._agent.deregister_memory(listed)
            except Exception as error:
                raise RegistrationError(
                    f"NIXL does not give back {memory.num_bytes} bytes at {memory.address:#x}: "
                    f"{error}"
                ) from error

    def metadata(self, memory: Range | None = None) -> bytes:
        """How others reach this agent and one registered range."""
        with self.entered():
            if memory is None:
                listed = self._api.nixlBind.nixlRegDList(self._api.nixlBind.DRAM_SEG)
            else:
                listed = self._memory[memory][0]
            made = self._agent.get_partial_agent_metadata(listed, True, [self.backend])
        return bytes(made)

    # Other agents.

    def know(self, name: str, metadata: bytes, *, may_replace: bool = True) -> None:
        """Load what another agent says of itself; again for the same is nothing.

        Args:
            name: the other agent.
            metadata: what it says.
            may_replace: take it also where it contradicts what is known, unless several links to
                the agent stand. Not for what a stranger may have sent in the agent's name.

        Raises:
            ProtocolMismatch: it is another's, or not NIXL's.
        """
        digest = hashlib.blake2b(metadata, digest_size=16).digest()
        with self.entered():
            if digest in self._known.get(name, ()):
                return
            if len(metadata) > MAX_METADATA_BYTES:
                raise ProtocolMismatch(
                    f"{len(metadata)} bytes of NIXL's metadata; at most {MAX_METADATA_BYTES}"
                )
            try:
                found = self._agent.add_remote_agent(metadata)
            except Exception as error:
                is_new = name not in self._known
                if is_new or not may_replace or self._num_links[name] > 1:
                    raise ProtocolMismatch(
                        f"NIXL does not take a peer's metadata: {error}"
                    ) from error
                found = self._know_anew(name, metadata)
            found = found.decode() if isinstance(found, bytes) else found
            if found != name:
                raise ProtocolMismatch(f"metadata of NIXL's agent {found!r} came for {name!r}")
            self._known.setdefault(name, {})[digest] = metadata

    def _know_anew(self, name: str, metadata: bytes) -> Any:
        """Load an agent's metadata that contradicts what is known of it.

        NIXL refuses another registration of memory that it knows, such as what was given back and
        taken again at the same address, and forgets all of an agent or nothing.

        Raises:
            ProtocolMismatch: it is refused all the same; what was known is known again.
        """
        earlier = self._known[name]
        self.forget(name)
        try:
            return self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise ProtocolMismatch(f"NIXL does not take a peer's metadata: {error}") from error
        finally:
            kept = self._known.setdefault(name, {})
            for digest, one in earlier.items():
                with suppress(Exception):  # what contradicts it is no more
                    self._agent.add_remote_agent(one)
                    kept[digest] = one

    @contextmanager
    def linked(self, name: str) -> Iterator[None]:
        """While a link to an agent stands: with several, what is known of it may not be dropped."""
        with self._lock:
            self._num_links[name] += 1
        try:
            yield
        finally:
            with nullcontext() if self._is_off else self._lock:
                self._num_links[name] -= 1
                if not self._num_links[name]:
                    del self._num_links[name]

    def forget(self, name: str) -> None:
        """Drop an agent that has ended: between two that go on, NIXL would keep sockets."""
        if self._is_off:
            return
        with self.entered():
            if self._known.pop(name, None) is not None:
                try:
                    self._agent.remove_remote_agent(name)
                except Exception:
                    return  # it is gone, which is what was wanted

    def send(self, name: str, message: Message) -> None:
        """Send a message.

        Raises:
            PeerLost: the other agent is gone.
        """
        with self.entered(), lost(name):
            self._agent.send_notif(name, message.encode())

    # Reading.

    def open_box(self, connection: bytes) -> Mailbox:
        """Have the messages of a connection put into a box of their own."""
        assert len(connection) == ID_BYTES
        with self._lock:
            box = self._boxes[connection] = Mailbox()
        return box

    def close_box(self, connection: bytes) -> None:
        """Drop a box."""
        if self._is_off:
            return
        with self._lock:
            self._boxes.pop(connection, None)

    def pump(self) -> bool:
        """Let NIXL go on, and sort what has come; whether anything has.

        Raises:
            PeerLost: the agent is closed.
        """
        if self._is_off or not self._lock.acquire(timeout=_PART_S):
            return False
        try:
            if self._agent is None:
                raise PeerLost("this side's NIXL agent is closed; connect again")
            with self.entered():
                found = self._agent.get_new_notifs()
        finally:
            self._lock.release()
        for sender, notifs in found.items():
            for data in notifs:
                message = decode(data)
                if message is not None:
                    self._sort(sender, message)
        return bool(found)

    def _sort(self, sender: str, message: Message) -> None:
        if message.kind is Kind.PARTED:
            for box in list(self._boxes.values()):
                box.put(sender, message)
            self.mail.put(sender, message)
        else:
            self._boxes.get(message.connection, self.mail).put(sender, message)

    # Transfers.

    def prepare(self, op: str, near: Rows, name: str, far: Rows) -> Prepared:
        """A transfer between as many rows here as at the other agent, in their order.

        Raises:
            PeerLost: the other agent is gone, or holds no such memory.
        """
        with self.entered(), lost(name):
            lists = (
                self._agent.prep_xfer_dlist(_OWN, near.table(), near.segment, [self.backend]),
                self._agent.prep_xfer_dlist(name, far.table(), far.segment, [self.backend]),
            )
            every = np.arange(near.addresses.size, dtype=np.int32)
            handle = self._agent.make_prepped_xfer(
                op, lists[0], every, lists[1], every, b"", [self.backend]
            )
        return Prepared(self, name, handle, lists)

    def close(self) -> None:
        """Tell the others, and end; what was prepared must have been released."""
        if self._is_off:
            return
        with self.entered():
            agent = self._agent
            if agent is None:
                return
            for name in list(self._known):
                try:
                    self.send(name, Message(bytes(ID_BYTES), Kind.PARTED))
                except PeerLost:
                    continue
            for _ in range(_PART_ROUNDS):  # what was sent leaves only as NIXL goes on
                agent.get_new_notifs()
            for name in list(self._known):
                self.forget(name)
            for listed, _ in self._memory.values():
                agent.deregister_memory(listed)
            self._memory.clear()
            self._agent = None

    def bar(self) -> None:
        """Let no thread into NIXL any more, once those that are in a call have ended it."""
        if self.is_inherited:
            return
        has_lock = self._lock.acquire(timeout=_EXIT_S)
        self._is_barred = True
        if has_lock:
            self._lock.release()


@atexit.register
def _bar_all() -> None:
    """Python ends by killing daemon threads; amid a call of NIXL's that aborts the process."""
    for agent in list(_all):
        agent.bar()
