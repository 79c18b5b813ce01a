"""Captures in which one thing is amiss, or in which two sources contradict each other.

Each is a healthy node of eight GPUs with one edit; none of them may pass without a word.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from captures import edit_capture, write_capture

from kvxfer.diagnose.result import CheckResult, Verdict
from kvxfer.diagnose.run import diagnose_folder
from kvxfer.errors import InvalidUsage

Edit = Callable[[Path], None]
UUID = r"GPU-[0-9a-f-]{36}"


def judged(folder: Path, check: str, *edits: Edit) -> CheckResult:
    capture = write_capture("hgx_h100", folder)
    for edit in edits:
        edit(capture)
    return next(one for one in diagnose_folder(capture).checks if one.check == check)


def edited(name: str, old: str, new: str, count: int = 1) -> Edit:
    return lambda capture: edit_capture(capture, name, old, new, count)


@pytest.mark.parametrize(
    ("state", "verdict", "words"),
    [
        *((word, Verdict.FAIL, "down: 7") for word in ("Disabled", "<disabled>", "Off", "Down")),
        *(
            (word, Verdict.WARN, "17 links up, of unknown state: 7")
            for word in ("N/A", "Unknown Error", "[Unknown Error]", "ERR!", "0 GB/s", "0.000 GB/s")
        ),
        ("26.562 GB/sec", Verdict.PASS, "18 links up"),
    ],
)
def test_a_link_is_up_where_it_has_a_rate(
    state: str, verdict: Verdict, words: str, tmp_path: Path
) -> None:
    found = judged(tmp_path, "nvlink-links", edited("nvlink.txt", "Link 7: .*", f"Link 7: {state}"))
    assert found.verdict is verdict
    assert words in (found.findings[0].evidence if found.findings else found.evidence)


def test_a_link_that_is_missing_beside_an_unknown_one_fails(tmp_path: Path) -> None:
    unknown = edited("nvlink.txt", "Link 7: .*", "Link 7: N/A")
    found = judged(
        tmp_path, "nvlink-links", unknown, edited("nvlink.txt", "Link 8: .*", "Link 8: <inactive>")
    )
    assert found.verdict is Verdict.FAIL
    assert "16 links up, down: 8, of unknown state: 7" in found.findings[0].evidence


def test_cards_of_unknown_links_are_not_cards_without_a_bridge(tmp_path: Path) -> None:
    (tmp_path / "nvlink.txt").write_text("GPU 0: NVIDIA A40 (UUID: GPU-1)\n\t Link 0: N/A\n")
    found = next(one for one in diagnose_folder(tmp_path).checks if one.check == "nvlink-links")
    assert found.verdict is Verdict.WARN


def down_on_gpu_5(capture: Path) -> None:
    edit_capture(capture, "nvlink.txt", r"(GPU 5:(?:.*\n)+?.*Link 7: ).*", r"\1<inactive>")


@pytest.mark.parametrize(
    "edits",
    [
        (edited("nvlink.txt", UUID, "GPU-x", 0), edited("query.txt", UUID, "GPU-x", 0)),
        (edited("nvlink.txt", UUID, "GPU-x", 0),),
        (edited("query.txt", UUID, "N/A", 0),),
        (edited("nvlink.txt", r"GPU-0000000", "GPU-1000000", 0),),
        (edited("nvlink.txt", r"GPU-00000003", "GPU-redacted", 0),),
    ],
)
def test_links_are_joined_by_index_where_uuids_do_not_tell(
    edits: tuple[Edit, ...], tmp_path: Path
) -> None:
    found = judged(tmp_path, "nvlink-links", *edits, down_on_gpu_5)
    assert [one.where for one in found.findings] == ["GPU 5 (0000:6a:00.0)"]


def test_links_are_joined_by_uuid_where_the_order_differs(tmp_path: Path) -> None:
    """Of nvidia-smi -i, say, which counts but some of the GPUs."""

    def only_gpu_5(capture: Path) -> None:
        sections = re.split(r"(?m)^(?=GPU 0)", (capture / "query.txt").read_text())
        (capture / "query.txt").write_text(sections[0] + sections[6])

    found = judged(tmp_path, "nvlink-links", down_on_gpu_5, only_gpu_5)
    assert [one.where for one in found.findings] == ["GPU 0 (0000:6a:00.0)"]


def test_links_of_a_gpu_that_one_text_lacks_are_unknown(tmp_path: Path) -> None:
    found = judged(tmp_path, "nvlink-links", edited("nvlink.txt", r"GPU 7:(.*\n?)*", ""))
    assert found.evidence == "18 links up on each of 7 GPUs; of 1 more none is told"


@pytest.mark.parametrize(
    "edit",
    [
        edited("nvlink.txt", "H100 80GB HBM3", "H200", 0),
        edited("nvlink.txt", "GPU 7:", "GPU 8:"),
    ],
)
def test_texts_of_different_gpus_are_not_joined(edit: Edit, tmp_path: Path) -> None:
    redacted = edited("nvlink.txt", UUID, "GPU-x", 0)
    found = judged(tmp_path, "nvlink-links", redacted, edit, down_on_gpu_5)
    assert found.verdict is Verdict.NOT_APPLICABLE
    assert "nvlink.txt and query.txt tell of different GPUs" in found.evidence


def test_two_texts_of_links_in_a_file_are_refused(tmp_path: Path) -> None:
    capture = write_capture("hgx_h100", tmp_path)
    text = (capture / "nvlink.txt").read_text()
    (capture / "nvlink.txt").write_text(text + text)
    with pytest.raises(InvalidUsage, match="tells of GPU 0 more than once"):
        diagnose_folder(capture)


HEALTH = r"Summary +: Healthy\n +Bandwidth +: Full"


@pytest.mark.parametrize(
    ("health", "words"),
    [
        ("Bandwidth : Full\n            Route Unhealthy : True", "unhealthy in its routes"),
        ("Route Recovery in progress : True", "recovering routes"),
        ("Access Timeout Recovery : True", "recovering from access timeouts"),
        (
            "Summary : Healthy\n            Incorrect Configuration : Invalid ClusterUUID",
            "configured incorrectly (invalid clusteruuid)",
        ),
        ("Summary : Limited Capacity", "limited capacity"),
        (
            "Summary : Unhealthy\n            Bandwidth : Degraded",
            "unhealthy, degraded in bandwidth",
        ),
    ],
)
def test_all_that_a_fabric_says_of_its_health_counts(
    health: str, words: str, tmp_path: Path
) -> None:
    found = judged(tmp_path, "fabric-state", edited("query.txt", HEALTH, health))
    assert [one.where for one in found.findings] == ["GPU 0 (0000:1a:00.0)"]
    assert (found.verdict, found.findings[0].evidence) == (Verdict.WARN, f"the fabric is {words}")


def test_a_fabric_that_is_well_in_all_it_says_passes(tmp_path: Path) -> None:
    health = (
        "Summary : HEALTHY\n            Bandwidth : FULL\n            Route Unhealthy : False\n"
        "            Access Timeout Recovery : N/A\n            Incorrect Configuration : None"
    )
    found = judged(tmp_path, "fabric-state", edited("query.txt", HEALTH, health, 0))
    assert found.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("state", "verdict", "words"),
    [
        ("Not Supported", Verdict.FAIL, "fabric state not supported, although 18 links are up"),
        ("N/A", Verdict.WARN, "it says nothing of the fabric that its twins are part of"),
        ("[Unknown Error]", Verdict.WARN, "it says nothing of the fabric"),
        ("ERR!", Verdict.WARN, "it says nothing of the fabric"),
    ],
)
def test_a_gpu_outside_of_the_fabric_of_its_twins_is_found(
    state: str, verdict: Verdict, words: str, tmp_path: Path
) -> None:
    done = r"State +: Completed\n( +)Status +: Success"
    edit = edited("query.txt", done, rf"State : {state}\n\1Status : N/A")
    found = judged(tmp_path, "fabric-state", edit)
    assert [one.where for one in found.findings] == ["GPU 0 (0000:1a:00.0)"]
    assert found.verdict is verdict
    assert words in found.findings[0].evidence


def test_a_gpu_of_another_kind_need_not_be_of_the_fabric(tmp_path: Path) -> None:
    state = edited("query.txt", r"(Fabric\n +State +): Completed", r"\1: N/A")
    name = edited("query.txt", "NVIDIA H100 80GB HBM3", "NVIDIA L4")
    found = judged(tmp_path, "fabric-state", state, name)
    assert (found.verdict, found.evidence) == (Verdict.PASS, "completed on 7 GPUs")


def test_a_row_that_waits_for_a_reset_is_a_warning(tmp_path: Path) -> None:
    edit = edited("query.txt", r"(Remapped Rows(?:\n.*){2}\n +Pending +): No", r"\1: Yes")
    found = judged(tmp_path, "memory-rows", edit)
    assert found.verdict is Verdict.WARN
    assert [one.where for one in found.findings] == ["GPU 0 (0000:1a:00.0)"]
    assert "reset the GPU" in found.findings[0].remedy


@pytest.mark.parametrize("token", ["PENDING", "U", "?"])
def test_a_p2p_status_that_nobody_knows_is_no_fault(token: str, tmp_path: Path) -> None:
    edits = [edited(name, r"OK", token) for name in ("p2p.txt", "p2p-read.txt")]
    for check in ("p2p-nvlink", "p2p-access"):
        found = judged(tmp_path / check, check, *edits)
        assert found.verdict is Verdict.PASS
        assert found.evidence.endswith("55 pairs; of 1 more no status is told")


def test_a_topology_that_misses_the_nvlinks_is_a_contradiction(tmp_path: Path) -> None:
    found = judged(tmp_path, "p2p-nvlink", edited("topo.txt", "NV18", "SYS", 0))
    assert (found.verdict, len(found.findings)) == (Verdict.WARN, 56)
    assert "topology says SYS, P2P status over NVLink is 'ok'" in found.findings[0].evidence


def test_reads_that_are_refused_over_a_good_nvlink_are_a_contradiction(tmp_path: Path) -> None:
    found = judged(tmp_path, "p2p-access", edited("p2p-read.txt", "OK", "CNS"))
    (finding,) = found.findings
    assert finding.evidence.endswith("read chipset not supported, over NVLink ok")
    assert "contradiction" in finding.cause
