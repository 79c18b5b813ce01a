"""One case moved by a peer library, in the process that runs it."""

from collections.abc import Callable

from kvxfer.sweep import messages
from kvxfer.sweep.agent import SweepAgent
from kvxfer.sweep.measure import Measurement
from kvxfer.sweep.peers.library import Ends, Mover
from kvxfer.sweep.peers.registry import row_of
from kvxfer.sweep.peers.task import PeerTask
from kvxfer.sweep.result import SweepResult
from kvxfer.sweep.rig import Rig, RigSpec
from kvxfer.transport import Tuning


def measure_peer(task: PeerTask, agent: SweepAgent, on_round: Callable[[], None]) -> SweepResult:
    """Prove and time a case, by the rules and beside the limit of kvxfer's own.

    Raises:
        NotAvailable: the library does not work here.
        VerificationError: wrong bytes, or a figure above the physical limit.
        KvxferError: what else a library ends in.
    """
    case = task.case
    spec = RigSpec(
        layout=case.layout,
        num_blocks=case.pool_blocks,
        transport=case.transport,
        memory=case.memory,
        op=case.op,
        num_threads=task.num_threads,
        devices=task.devices,
        copy_threads=task.num_threads,
    )
    with Rig(spec, agent) as rig, connect(rig, agent, case.peer) as mover:
        return Measurement(
            case,
            rig,
            tuning=Tuning(),
            iters=task.iters,
            warmup=task.warmup,
            seed=task.seed,
            on_round=on_round,
            mover=mover,
        ).run()


def connect(rig: Rig, agent: SweepAgent, row_name: str) -> Mover:
    """Both sides of a library, over the pools of a rig.

    Raises:
        NotAvailable: the library does not work here.
    """
    library, row = row_of(row_name)
    opened: messages.OpenedPeer = agent.call(messages.OpenPeer(row=row.name))
    ends = Ends(
        op=rig.spec.op,
        near_address=rig.local.start_address,
        near_device=rig.local.cache.device,
        mapped_address=int(rig.peer.view.addresses[0, 0]),
        far_address=opened.address,
        far_device=opened.device,
        num_bytes=rig.local.num_bytes,
        page_bytes=rig.spec.layout.page_bytes,
        num_threads=rig.spec.num_threads,
        contact=opened.contact,
    )
    return library.connect(ends, row)
