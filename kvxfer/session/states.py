"""The two tables of a session: a request at its receiver, and a delivery to one rank at its sender.

DESIGN.md draws them. In a row None means that the event changes nothing there, and says so on
purpose: every event has an entry in every state.
"""

from dataclasses import dataclass
from enum import Enum

from kvxfer.session.state_machine import Step, Table


class Receiving(Enum):
    """Where a request is at its receiver."""

    WAITING = "waiting"  # for blocks
    RECEIVING = "receiving"  # writers may write to its blocks
    DRAINING = "draining"  # it has failed, and a writer may still write
    DONE = "done"
    FAILED = "failed"


class ReceiveEvent(Enum):
    """What can happen to it."""

    GRANT = "grant"  # it has blocks
    REFUSE = "refuse"  # the scheduler will not place it
    COVERED = "covered"  # every layer and head was committed
    GIVE_UP = "give_up"  # a writer aborts, leaves, dies or is cut off, or the engine aborts
    DRAINED = "drained"  # no write to its blocks can come any more
    LATE = "late"


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """How long a receiver waits, in seconds.

    Attributes:
        wait_s: for blocks.
        receive_s: from the grant to the last commit.
        drain_s: for the writers of a failed request to end; after it the failure is told, with its
            blocks in quarantine.
        silent_s: for a sign of life of a sender; there is one a second.
        num_requests: requests that are open, or whose notice was not fetched; more have to wait.
    """

    wait_s: float = 30.0
    receive_s: float = 60.0
    drain_s: float = 2.0
    silent_s: float = 5.0
    num_requests: int = 4096


_R, _RE = Receiving, ReceiveEvent
RECEIVE_TABLE: Table[Receiving, ReceiveEvent] = Table(
    start=_R.WAITING,
    late=_RE.LATE,
    limits={_R.WAITING: "wait_s", _R.RECEIVING: "receive_s", _R.DRAINING: "drain_s"},
    steps={
        _R.WAITING: {
            _RE.GRANT: Step(_R.RECEIVING, "start"),
            _RE.REFUSE: Step(_R.FAILED, "fail"),
            _RE.COVERED: None,  # nobody can commit what was not granted
            _RE.GIVE_UP: Step(_R.FAILED, "fail"),
            _RE.DRAINED: None,
            _RE.LATE: Step(_R.FAILED, "fail"),
        },
        _R.RECEIVING: {
            _RE.GRANT: None,
            _RE.REFUSE: None,
            _RE.COVERED: Step(_R.DONE, "complete"),
            _RE.GIVE_UP: Step(_R.DRAINING, "drain"),
            _RE.DRAINED: None,
            _RE.LATE: Step(_R.DRAINING, "drain"),
        },
        _R.DRAINING: {
            _RE.GRANT: None,
            _RE.REFUSE: None,
            _RE.COVERED: None,
            _RE.GIVE_UP: None,
            _RE.DRAINED: Step(_R.FAILED, "fail"),
            _RE.LATE: Step(_R.FAILED, "quarantine"),
        },
        _R.DONE: dict.fromkeys(_RE),
        _R.FAILED: dict.fromkeys(_RE),
    },
)


class Sending(Enum):
    """Where a delivery to one rank is at its sender."""

    CONNECTING = "connecting"
    RESERVING = "reserving"
    MOVING = "moving"  # bytes, or layers that are not ready yet
    COMMITTING = "committing"
    LEAVING = "leaving"  # the peer is gone; copies to its memory are in flight
    DRAINING = "draining"  # it has failed; copies are in flight
    ABORTING = "aborting"
    DONE = "done"
    FAILED = "failed"


class SendEvent(Enum):
    """What can happen to it."""

    CONNECTED = "connected"
    GRANTED = "granted"
    MOVED = "moved"  # all bytes are visible over there
    COMMITTED = "committed"
    ERROR = "error"  # the peer refuses, or a copy fails: trying again would not help
    LOST = "lost"  # the peer is gone, another one, or cut off
    CANCEL = "cancel"  # the caller, or another rank of the request, gives it up
    DRAINED = "drained"  # no copy is in flight
    ABORTED = "aborted"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class SendLimits:
    """How long a sender waits, in seconds, and how often it tries.

    Attributes:
        connect_s: for a peer to answer, also for one that restarts.
        reserve_s: for blocks.
        move_s: from the grant until all bytes are visible, layers included that are not ready yet.
        commit_s: for the answer to commit.
        drain_s: for copies in flight to end after a failure.
        abort_s: for the answer to abort.
        silent_s: for a sign of life of a receiver; there is one a second.
        num_attempts: times that a request is sent in all where its peer is lost on the way. A
            successor takes it; a peer that lived on has ended it if it knew it, and refuses it.
        num_requests: requests at a time; more are refused.
    """

    connect_s: float = 10.0
    reserve_s: float = 30.0
    move_s: float = 60.0
    commit_s: float = 10.0
    drain_s: float = 30.0
    abort_s: float = 2.0
    silent_s: float = 5.0
    num_attempts: int = 3
    num_requests: int = 4096


_S, _SE = Sending, SendEvent
SEND_TABLE: Table[Sending, SendEvent] = Table(
    start=_S.CONNECTING,
    late=_SE.LATE,
    limits={
        _S.CONNECTING: "connect_s",
        _S.RESERVING: "reserve_s",
        _S.MOVING: "move_s",
        _S.COMMITTING: "commit_s",
        _S.LEAVING: "drain_s",
        _S.DRAINING: "drain_s",
        _S.ABORTING: "abort_s",
    },
    steps={
        _S.CONNECTING: dict.fromkeys(_SE)
        | {
            _SE.CONNECTED: Step(_S.RESERVING, "reserve"),
            _SE.COMMITTED: Step(_S.DONE, "end"),  # this rank has nothing for that one
            _SE.ERROR: Step(_S.FAILED, "end"),
            _SE.CANCEL: Step(_S.FAILED, "end"),
            _SE.LATE: Step(_S.FAILED, "end"),
        },
        _S.RESERVING: dict.fromkeys(_SE)
        | {
            _SE.GRANTED: Step(_S.MOVING, "move"),
            _SE.ERROR: Step(_S.ABORTING, "abort"),
            _SE.LOST: Step(_S.LEAVING, "leave"),
            _SE.CANCEL: Step(_S.ABORTING, "abort"),
            _SE.LATE: Step(_S.ABORTING, "abort"),  # it may have been granted
        },
        _S.MOVING: dict.fromkeys(_SE)
        | {
            _SE.MOVED: Step(_S.COMMITTING, "commit"),
            _SE.ERROR: Step(_S.DRAINING, "drain"),
            _SE.LOST: Step(_S.LEAVING, "leave"),
            _SE.CANCEL: Step(_S.DRAINING, "drain"),
            _SE.LATE: Step(_S.DRAINING, "drain"),
        },
        _S.COMMITTING: dict.fromkeys(_SE)
        | {
            _SE.COMMITTED: Step(_S.DONE, "end"),
            _SE.ERROR: Step(_S.ABORTING, "abort"),
            _SE.LOST: Step(_S.LEAVING, "leave"),
            _SE.CANCEL: Step(_S.ABORTING, "abort"),
            _SE.LATE: Step(_S.ABORTING, "abort"),
        },
        _S.LEAVING: dict.fromkeys(_SE)
        | {
            _SE.DRAINED: Step(_S.CONNECTING, "reconnect"),
            _SE.CANCEL: Step(_S.DRAINING, "drain"),
            _SE.LATE: Step(_S.FAILED, "owe"),  # copies to a peer that is gone have not ended
        },
        _S.DRAINING: dict.fromkeys(_SE)
        | {
            _SE.DRAINED: Step(_S.ABORTING, "abort"),
            _SE.LATE: Step(_S.FAILED, "owe"),
        },
        _S.ABORTING: dict.fromkeys(_SE)
        | {
            _SE.ABORTED: Step(_S.FAILED, "end"),
            _SE.ERROR: Step(_S.FAILED, "end"),
            _SE.LOST: Step(_S.FAILED, "end"),
            _SE.LATE: Step(_S.FAILED, "owe"),
        },
        _S.DONE: dict.fromkeys(_SE),
        _S.FAILED: dict.fromkeys(_SE),
    },
)
