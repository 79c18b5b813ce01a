"""NVLinks, the NVSwitch fabric and its manager."""

from statistics import mode

from kvxfer.diagnose.checks.base import (
    Absent,
    Answer,
    Check,
    Fine,
    answer,
    describe,
    fail,
    listed,
    no_gpus,
    warn,
)
from kvxfer.diagnose.expected import LINK_ERRORS_TOLERATED, expected_links, may_be_unlinked
from kvxfer.diagnose.facts import Facts, Gpu
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.result import Finding

_DOWN = "a link did not train, or was turned off after errors"
_DOWN_REMEDY = "reset GPU and switches; reseat or replace the part if it stays down"


def _links(facts: Facts, _: Figures) -> Answer:
    gpus = [gpu for gpu in facts.gpus or () if gpu.links]
    if not gpus:
        if not facts.gpus:
            return no_gpus(facts)
        return Absent(facts.sources.get("NVLinks", "no GPU here has NVLink"))
    all_down = all(link.active is False for gpu in gpus for link in gpu.links or ())
    if all_down and all(may_be_unlinked(gpu.name) for gpu in gpus):
        return Absent("no NVLink is up, as on cards with no bridge between them")
    findings = [found for gpu in gpus if (found := _missing_links(gpu, gpus)) is not None]
    counts = sorted({len(gpu.active_links) for gpu in gpus})
    untold = sum(gpu.links is None for gpu in facts.gpus or ())
    evidence = f"{'/'.join(map(str, counts))} links up on each of {len(gpus)} GPUs"
    return answer(findings, evidence + (f"; of {untold} more none is told" if untold else ""))


def _missing_links(gpu: Gpu, gpus: list[Gpu]) -> Finding | None:
    """Fewer links up than the part has, or than its twins have."""
    num_up = len(gpu.active_links)
    down, unknown = (
        [str(link.index) for link in gpu.links or () if link.active is state]
        for state in (False, None)
    )
    twins = max(len(other.active_links) for other in gpus if other.name == gpu.name)
    expected = expected_links(gpu.name)
    evidence = f"{num_up} links up" + (f", down: {listed(down)}" if down else "")
    evidence += f", of unknown state: {listed(unknown)}" if unknown else ""
    if not num_up and not unknown:
        return _no_links(gpu, expected)
    if num_up + len(unknown) < max(twins, expected or 0):
        than = f"a {gpu.name} has {expected}" if expected else f"its twins have {twins}"
        return fail(describe(gpu), f"{evidence}; {than}", cause=_DOWN, remedy=_DOWN_REMEDY)
    if unknown:
        cause = "neither a rate nor a known word was told of them: a link, or the query, failed"
        remedy = "run nvidia-smi nvlink -s again; reset the GPU if its answer stays"
        return warn(describe(gpu), evidence, cause=cause, remedy=remedy)
    if down and expected is None:
        return warn(
            describe(gpu),
            f"{evidence}, as on its twins",
            cause=f"{gpu.name or 'this part'} is not known here: by design, or a fault of all",
            remedy="compare with the part's data sheet",
        )
    return None


def _no_links(gpu: Gpu, expected: int | None) -> Finding:
    """None is up at all: a card without its bridge, or a part that is off the fabric."""
    evidence = "no NVLink is up" + (f"; a {gpu.name} has {expected}" if expected else "")
    if may_be_unlinked(gpu.name):
        cause, remedy = "no bridge is mounted on it, or it has no contact", "mount it, or reseat it"
        return warn(describe(gpu), f"{evidence}; others here have some", cause=cause, remedy=remedy)
    return fail(describe(gpu), evidence, cause=_DOWN, remedy=_DOWN_REMEDY)


def _reach(facts: Facts, _: Figures) -> Answer:
    """By the topology alone, which tells even where nothing is said of the links themselves."""
    best: dict[int, int] = {}
    for pair in facts.pairs:
        if pair.path:
            best[pair.src] = max(best.get(pair.src, 0), pair.num_nvlinks)
    joined = [count for count in best.values() if count]
    if not joined:
        return no_gpus(facts) if not facts.gpus else Absent("no pair of GPUs is joined by NVLink")
    usual = mode(joined)
    findings = [
        found
        for gpu in facts.gpus or ()
        if gpu.index in best
        and (found := _poor_reach(gpu, best[gpu.index], usual, len(joined))) is not None
    ]
    return answer(findings, f"{usual} links at best from each of {len(best)} GPUs")


def _poor_reach(gpu: Gpu, count: int, usual: int, num_joined: int) -> Finding | None:
    if not count:
        # Cards are bridged in pairs; where three and more are joined it is a board.
        finding = fail if num_joined > 2 else warn
        return finding(
            describe(gpu),
            f"no NVLink to any GPU; {num_joined} others are joined by up to {usual}",
            cause="it is off the fabric, its links are down, or it has no bridge",
            remedy="see its links and fabric state; reset GPU and switches; transfers avoid it",
        )
    if count < usual and gpu.links is None:  # else nvlink-links says which are down
        return fail(
            describe(gpu),
            f"{count} links at best, the others {usual}",
            cause=_DOWN,
            remedy=_DOWN_REMEDY,
        )
    return None


def _errors(facts: Facts, _: Figures) -> Answer:
    known = [
        (gpu, link)
        for gpu in facts.gpus or ()
        for link in gpu.active_links
        if link.num_errors is not None
    ]
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("no NVLink counts its errors")
    return answer(
        [
            warn(
                f"{describe(gpu)}, link {link.index}",
                f"{link.num_errors} replays, recoveries and CRC errors since the driver started",
                cause="a link of poor quality: it repeats packets, which costs rate",
                remedy="watch whether it grows; reseat or replace the part if it does",
            )
            for gpu, link in known
            if (link.num_errors or 0) > LINK_ERRORS_TOLERATED
        ],
        f"{max(link.num_errors or 0 for _, link in known)} at most on each of {len(known)} links",
    )


def _fabric(facts: Facts, _: Figures) -> Answer:
    gpus = facts.gpus or ()
    members = [gpu for gpu in gpus if gpu.fabric and gpu.fabric.state != "not supported"]
    if not members:
        return no_gpus(facts) if not gpus else Absent("no GPU here registers with a fabric")
    parts = {gpu.name for gpu in members}
    findings = [
        found for gpu in gpus if gpu.name in parts and (found := _fabric_fault(gpu)) is not None
    ]
    cliques = {(gpu.fabric.cluster, gpu.fabric.clique) for gpu in members if gpu.fabric}
    if not findings and len(cliques) > 1:
        text = listed([f"GPU {gpu.index}: {gpu.fabric and gpu.fabric.clique}" for gpu in members])
        findings.append(
            warn(
                "fabric",
                f"GPUs of this node are of {len(cliques)} cliques: {text}",
                cause="the fabric is partitioned: GPUs of two cliques cannot reach each other",
                remedy="place one engine within a clique, or change the partition",
            )
        )
    return answer(findings, f"completed on {len(members)} GPUs")


def _fabric_fault(gpu: Gpu) -> Finding | None:
    fabric, num_up = gpu.fabric, len(gpu.active_links)
    if fabric is None:
        return warn(
            describe(gpu),
            "it says nothing of the fabric that its twins are part of",
            cause="it does not answer for its fabric state, or is not part of the fabric",
            remedy="see nvidia-smi -q, section Fabric, and the fabric manager's log",
        )
    if fabric.state == "completed" and fabric.status in ("", "success"):
        if fabric.health in ("", "healthy"):
            return None
        return warn(
            describe(gpu),
            f"the fabric is {fabric.health}",
            cause="links or routes of the fabric were lost, or it is set up wrongly",
            remedy="see nvidia-smi -q, section Fabric, and the fabric manager's log",
        )
    evidence = f"fabric state {fabric.state}"
    if fabric.status:
        evidence += f", status {fabric.status}"
    if num_up:
        evidence += f", although {num_up} links are up: links train without the fabric"
    return fail(
        describe(gpu),
        evidence,
        cause="the GPU is not registered with the fabric manager; peer access fails or is slow",
        remedy="restart the fabric manager, read its log, then reset the GPU",
    )


def _manager(facts: Facts, _: Figures) -> Answer:
    host = facts.host
    switched = bool(host.nvswitch_pcis) or any(
        link.remote == "switch" for gpu in facts.gpus or () for link in gpu.active_links
    )
    if not switched and not host.fabric_manager:
        return no_gpus(facts) if not facts.gpus else Absent("no NVSwitch here")
    findings = []
    if host.fabric_manager_running is False and host.nvswitch_pcis:
        findings.append(
            fail(
                "fabric manager",
                "there are NVSwitches, but nv-fabricmanager does not run",
                cause="its service is stopped or failed",
                remedy="systemctl start nvidia-fabricmanager, and read its log",
            )
        )
    if host.fabric_manager and host.driver and host.fabric_manager != host.driver:
        findings.append(
            fail(
                "fabric manager",
                f"version {host.fabric_manager}, driver {host.driver}",
                cause="the two must be of one version: one was updated without the other",
                remedy=f"install the fabric manager of version {host.driver}",
            )
        )
    if not findings and not host.fabric_manager:
        return Absent("the fabric manager cannot be seen from here")
    return findings or Fine(f"version {host.fabric_manager}, as the driver")


CHECKS = (
    Check("fabric-state", "is the NVSwitch fabric complete", _fabric),
    Check("fabric-manager", "does the fabric manager fit the driver", _manager),
    Check("nvlink-links", "are all NVLinks up", _links),
    Check("nvlink-reach", "does NVLink join every GPU to others", _reach),
    Check("nvlink-errors", "are the NVLinks free of errors", _errors),
)
