"""NIXL's agent with its whole API; transfers between two such agents of one host are kvxfer's.

Every method asks NIXL first or last: lists are prepared by both, so that a transfer that is not
kvxfer's goes to NIXL as it would have gone, and a wrong argument fails as NIXL has it fail.
"""

import copy
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvxfer.connectors.nixl_agent.facts import seal, unseal
from kvxfer.connectors.nixl_agent.handles import ListHandle, TransferHandle
from kvxfer.connectors.nixl_agent.lanes import Job, now_us
from kvxfer.connectors.nixl_agent.ledger import Span
from kvxfer.connectors.nixl_agent.pairing import (
    LeftToNixl,
    ListSide,
    Pairing,
    every,
    require_integers,
)
from kvxfer.connectors.nixl_agent.rows import rows_of
from kvxfer.connectors.nixl_agent.telemetry import Telemetry
from kvxfer.errors import InvalidUsage, KvxferError
from kvxfer.memory import MemoryKind
from kvxfer.transport.nixl.api import load_api

_api: Any = load_api()
_log = logging.getLogger(__name__)
_BACKEND = "UCX"
_KINDS = {
    _api.nixlBind.DRAM_SEG: MemoryKind.HOST,
    _api.nixlBind.VRAM_SEG: MemoryKind.DEVICE,
}


class AcceleratedAgent(_api.nixl_agent):  # type: ignore[misc]
    """NIXL's agent; see :mod:`kvxfer.connectors.nixl_agent` for what differs."""

    def __init__(
        self, agent_name: str, nixl_conf: Any = None, instantiate_all: bool = False
    ) -> None:
        """As NIXL's. Where no ``sync_mode`` is chosen it is STRICT: threads send notifications."""
        everything = instantiate_all and not nixl_conf
        conf = copy.copy(nixl_conf) if nixl_conf else _api.nixl_agent_config()
        if everything:
            conf.backends = []
        if conf.sync_mode is None:
            conf.sync_mode = _api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        super().__init__(agent_name, conf, instantiate_all and not everything)
        for backend in self.plugin_list if everything else ():
            self.create_backend(backend, {})
        self._has_telemetry = bool(conf.capture_telemetry)
        self._has_progress = bool(conf.enable_pthread)
        self._pairing = Pairing()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        weakref.finalize(self, self._pairing.close)

    @property
    def acceleration(self) -> dict[str, int]:
        """How often what was done: ``accelerated`` transfers and ``accelerated_bytes``, when they
        were posted; else, by the reason, how often something was left to NIXL."""
        with self._lock:
            return dict(self._counts)

    # Memory.

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> Any:
        """As NIXL's; host and device memory is also made reachable for agents of this host."""
        descs = super().register_memory(reg_list, mem_type, backends)
        if not self._takes(backends):
            self._leave("memory of other back ends")
            return descs
        for span in _spans(descs):
            try:
                self._pairing.ledger.add(span)
            except KvxferError as error:
                self._leave("memory that others cannot open", str(error))
        return descs

    def deregister_memory(self, dereg_list: Any, backends: Sequence[str] = ()) -> None:
        """As NIXL's; transfers of it that are posted from now on end as ERR."""
        for span in _spans(dereg_list):
            self._pairing.ledger.remove(span)
        super().deregister_memory(dereg_list, backends)

    # Other agents.

    def get_agent_metadata(self) -> bytes:
        """NIXL's, which a stock agent reads, and behind it what an accelerated one needs."""
        return seal(super().get_agent_metadata(), self._pairing.ledger.facts())

    def get_partial_agent_metadata(
        self, descs: Any, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """Likewise, of these registrations."""
        data = super().get_partial_agent_metadata(descs, inc_conn_info, backends)
        return seal(data, self._pairing.ledger.facts(_spans(descs)))

    def add_remote_agent(self, metadata: bytes) -> Any:
        """As NIXL's; the name that it returns is of an accelerated peer where it is one."""
        data, facts = unseal(bytes(metadata))
        found = super().add_remote_agent(data)
        name = _text(found)
        try:
            self._pairing.meet(name, facts)
        except KvxferError as error:
            self._leave("peers that are not reached directly", f"{name}: {error}")
        return found

    def remove_remote_agent(self, agent: str) -> None:
        """As NIXL's."""
        self._pairing.forget(_text(agent))
        super().remove_remote_agent(agent)

    # Lists.

    def prep_xfer_dlist(
        self,
        agent_name: str,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> Any:
        """As NIXL's."""
        strided = (
            isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and (xfer_list.shape[1] == 5)
        )
        descs = xfer_list if strided else self.get_xfer_descs(xfer_list, mem_type)
        stock = super().prep_xfer_dlist(agent_name, descs, mem_type, backends)
        if strided:
            return ListHandle(stock, None, "strided lists")
        if not self._takes(backends):
            return ListHandle(stock, None, "other back ends")
        return ListHandle(stock, *self._side(_text(agent_name), descs))

    def _side(self, name: str, descs: Any) -> tuple[ListSide | None, str]:
        """A list for kvxfer, or why it is none for it."""
        kind = _KINDS.get(descs.getType())
        if kind is None:
            return None, "files and objects"
        try:
            return self._pairing.side(name, kind, rows_of(descs)), ""
        except KvxferError as error:
            reason, detail = _reason(error)
            if detail:
                self._leave(reason, detail)
            return None, reason

    # Transfers.

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        remote_xfer_side: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> Any:
        """As NIXL's."""

        def stock() -> Any:
            return super(AcceleratedAgent, self).make_prepped_xfer(
                operation,
                local_xfer_side,
                local_indices,
                remote_xfer_side,
                remote_indices,
                notif_msg,
                backends,
                skip_desc_merge,
            )

        return self._ours_or(
            stock,
            operation,
            lambda: (_held(local_xfer_side), _held(remote_xfer_side)),
            (local_indices, remote_indices),
            notif_msg,
            backends,
        )

    def initialize_xfer(
        self,
        operation: str,
        local_descs: Any,
        remote_descs: Any,
        remote_agent: str,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
    ) -> Any:
        """As NIXL's."""

        def stock() -> Any:
            return super(AcceleratedAgent, self).initialize_xfer(
                operation, local_descs, remote_descs, remote_agent, notif_msg, backends
            )

        def sides() -> tuple[ListSide, ListSide]:
            far = self._side(_text(remote_agent), remote_descs)
            return _required(*self._side("", local_descs)), _required(*far)

        return self._ours_or(stock, operation, sides, None, notif_msg, backends)

    def _ours_or(
        self,
        stock: Callable[[], Any],
        operation: str,
        sides: Callable[[], tuple[ListSide, ListSide]],
        indices: tuple[Any, Any] | None,
        message: bytes | str,
        backends: Sequence[str],
    ) -> Any:
        """A transfer of kvxfer's between two lists, or else NIXL's; no indices = all of both."""
        try:
            if operation not in self.nixl_ops or not self._takes(backends):
                raise LeftToNixl("other back ends or operations")
            if not self._has_progress:
                raise LeftToNixl("agents without NIXL's progress thread, which notifications need")
            near, far = sides()
            chosen = (
                [every(near), every(far)]
                if indices is None
                else [require_integers(one) for one in indices]
            )
            what, lane, peer = self._pairing.copy_of(
                (near, far), chosen, writes=operation == "WRITE"
            )
        except KvxferError as error:
            self._leave(*_reason(error))
            return stock()
        return TransferHandle(
            agent=self.agent,
            copy=what,
            lane=lane,
            peer=peer,
            num_descs=chosen[0].size,
            message=_bytes(message),
            make_stock=stock,
        )

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        """As NIXL's."""
        if not isinstance(handle, TransferHandle):
            return str(super().transfer(handle, notif_msg))
        handle.require_held()
        if handle.is_active:
            raise _api.nixlBind.nixlRepostActiveError("the transfer is still in progress")
        if handle.peer.is_closed:
            raise _api.nixlBind.nixlNotFoundError(f"agent {handle.peer.name} was removed")
        handle.message = _bytes(notif_msg) or handle.message
        handle.job = job = Job(handle.copy, self._notification(handle))
        try:
            handle.lane.post(job)
        except KvxferError as error:
            _log.error("a transfer with %s was not started: %s", handle.peer.name, error)
            job.fail()
        job.post_us = now_us() - job.posted_us
        with self._lock:
            self._counts["accelerated"] += 1
            self._counts["accelerated_bytes"] += handle.copy.num_bytes
        return job.state

    def _notification(self, handle: TransferHandle) -> Any:
        message, name, native = handle.message, handle.peer.name, self.agent
        return (lambda: native.genNotif(name, message)) if message else (lambda: None)

    def check_xfer_state(self, handle: Any) -> str:
        """As NIXL's."""
        if not isinstance(handle, TransferHandle):
            return str(super().check_xfer_state(handle))
        return self._posted(handle).state

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """As NIXL's."""
        if not isinstance(handle, TransferHandle):
            return super().get_xfer_telemetry(handle)
        if not self._has_telemetry:
            raise _api.nixlBind.nixlNoTelemetryError("capture_telemetry is off")
        job = self._posted(handle)
        if job.state != "DONE":
            raise _api.nixlBind.nixlNotPostedError("the transfer is not complete")
        return Telemetry(
            startTime=job.posted_us,
            postDuration=min(job.post_us, job.ended_us - job.posted_us),
            xferDuration=job.ended_us - job.posted_us,
            totalBytes=handle.copy.num_bytes,
            descCount=handle.num_descs,
        )

    def _posted(self, handle: TransferHandle) -> Job:
        handle.require_held()
        if handle.job is None:
            raise _api.nixlBind.nixlNotPostedError("the transfer was not posted")
        return handle.job

    # What is left to NIXL.

    def _takes(self, backends: Sequence[str]) -> bool:
        """Whether these back ends leave the choice to us: notifications go over UCX."""
        return _BACKEND in self.backends and (not backends or _BACKEND in backends)

    def _leave(self, reason: str, detail: str = "") -> None:
        """Count what goes to NIXL, and say why the first time."""
        with self._lock:
            self._counts[reason] += 1
            is_new = self._counts[reason] == 1
        if is_new:
            _log.info("left to NIXL: %s%s", reason, f" ({detail})" if detail else "")


def _spans(descs: Any) -> Iterable[Span]:
    kind = _KINDS.get(descs.getType())
    if kind is None:
        return []
    found = [descs[at] for at in range(descs.descCount())]
    return [Span(kind, int(row[2]), int(row[0]), int(row[1])) for row in found]


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _bytes(message: bytes | str) -> bytes:
    return message.encode() if isinstance(message, str) else bytes(message)


def _held(handle: Any) -> ListSide:
    """The list behind a handle.

    Raises:
        LeftToNixl: transfers of it are NIXL's, and why.
    """
    return _required(getattr(handle, "side", None), getattr(handle, "why", "lists of other agents"))


def _reason(error: KvxferError) -> tuple[str, str]:
    """Why something is NIXL's, in words that can be counted, and what else is to be said."""
    if isinstance(error, InvalidUsage):
        return "arguments that do not fit", str(error)
    if isinstance(error, LeftToNixl):
        return str(error), ""
    return "memory that is not reached directly", str(error)


def _required(side: ListSide | None, why: str) -> ListSide:
    if side is None:
        raise LeftToNixl(why)
    return side
