"""Is the KV that arrived the KV that was sent? Compares what both sides of hand-overs wrote.

    KVXFER_DIGESTS=digests.jsonl kvxfer pd demo --logs LOGS ...
    python bench/kv_bytes.py LOGS --json kv_bytes.json

vLLM's workers with kvxfer's connector write digests where ``KVXFER_DIGESTS`` says, as seen from the
folder where an engine stands (`kvxfer.connectors.vllm.digests`). All files of digests below the
given folders are read; a transfer whose name occurs in several folders is one in each. Compared is
each block of each layer that was received with the block of that place in the prompt that was sent.
Exit status: 0 where all are equal, 1 where one differs or was never sent, 2 where a file cannot be
read or written, 3 where there is nothing to compare.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvxfer.connectors.vllm.digests import DIGEST_BYTES, MARK, Line, read_lines
from kvxfer.errors import InvalidUsage
from kvxfer.whole_file import write_whole

EXIT_DIFFERENT, EXIT_UNREADABLE, EXIT_NOTHING = 1, 2, 3
MAX_NAMED = 20
Digests = dict[tuple[str, int], bytes]  # by layer and place in the prompt


class Difference(NamedTuple):
    """A block of a layer that is not what was sent."""

    request: str
    rank: str
    layer: str
    block: int
    tokens: tuple[int, int]
    what: str

    def __str__(self) -> str:
        first, end = self.tokens
        return (
            f"request {self.request}, rank {self.rank}, layer {self.layer}, block {self.block} "
            f"(tokens {first} to {end - 1}): {self.what}"
        )


@dataclass
class Comparison:
    """What was found.

    Attributes:
        requests: that were compared, in one rank at least.
        num_blocks: blocks of a layer of a rank that were compared.
        num_bytes: bytes of KV in them.
        num_unread: the sender's blocks of a layer that the decoder did not take: in its prefix
            cache, or outside of a window.
        differences: all.
        not_comparable: for each reason how many ranks of requests.
        num_sent_alone, num_received_alone: requests that only one side has written of.
    """

    requests: set[tuple[Path, str]] = field(default_factory=set)
    num_blocks: int = 0
    num_bytes: int = 0
    num_unread: int = 0
    differences: list[Difference] = field(default_factory=list)
    not_comparable: Counter[str] = field(default_factory=Counter)
    num_sent_alone: int = 0
    num_received_alone: int = 0

    @property
    def status(self) -> int:
        """The exit status."""
        if self.differences:
            return EXIT_DIFFERENT
        return 0 if self.num_blocks else EXIT_NOTHING

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "num_requests": len(self.requests),
            "num_blocks": self.num_blocks,
            "num_bytes": self.num_bytes,
            "num_sent_blocks_not_received": self.num_unread,
            "num_requests_sent_alone": self.num_sent_alone,
            "num_requests_received_alone": self.num_received_alone,
            "not_comparable": dict(self.not_comparable),
            "differences": [one._asdict() for one in self.differences],
        }


def files_below(places: list[Path]) -> list[Path]:
    """Files of digests, in a fixed order; other files are left alone."""
    found = set()
    for place in places:
        if not place.exists():
            raise InvalidUsage(f"{place} is not there")
        for path in place.rglob("*") if place.is_dir() else [place]:
            if path.is_file() and _is_marked(path):
                found.add(path.resolve())
    return sorted(found)


def _is_marked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MARK)) == MARK
    except OSError as error:
        raise InvalidUsage(f"cannot read {path}: {error.strerror}") from error


def compare(lines: Iterator[tuple[Path, Line]]) -> Comparison:
    """All requests; the sides of one are looked for in one folder, and else in all."""
    sides: dict[str, dict[tuple[Path, str], list[Line]]] = {
        "sent": defaultdict(list),
        "received": defaultdict(list),
    }
    for folder, line in lines:
        sides[line.side][folder, line.transfer].append(line)
    sent, received = sides["sent"], sides["received"]
    named = defaultdict(list)
    for one in sent:
        named[one[1]].append(one)
    found = Comparison()
    used = set()
    for key, got in received.items():
        source = _source_of(key, named)
        if source is None:
            found.num_received_alone += 1
            continue
        used.add(source)
        for line in got:
            _compare_rank(found, key, sent[source], line)
    found.num_sent_alone = len(sent.keys() - used)
    return found


def _source_of(
    key: tuple[Path, str], named: dict[str, list[tuple[Path, str]]]
) -> tuple[Path, str] | None:
    """Which sender's lines are those of a request that was received; senders are by transfer."""
    found = named.get(key[1], [])
    if key in found:
        return key
    return found[0] if len(found) == 1 else None  # engines that stand in different folders


def _compare_rank(
    found: Comparison, key: tuple[Path, str], candidates: list[Line], received: Line
) -> None:
    matching = [line for line in candidates if line.rank == received.rank]
    if reason := why_not(candidates, matching, received):
        found.not_comparable[reason] += 1
        return
    (sent,) = matching
    source, target = _by_block(sent), _by_block(received)
    for place, digest in target.items():
        if source.get(place) != digest:
            layer, block = place
            tokens = (block * received.block_tokens, (block + 1) * received.block_tokens)
            what = "other bytes than were sent" if place in source else "was not sent"
            found.differences.append(
                Difference(received.transfer, received.rank, layer, block, tokens, what)
            )
    found.requests.add(key)
    found.num_blocks += len(target)
    found.num_bytes += len(target) * received.block_bytes
    found.num_unread += len(source.keys() - target.keys())


def why_not(candidates: list[Line], matching: list[Line], received: Line) -> str:
    """Why a rank's digests cannot be compared; empty where they can."""
    if not matching:
        ranks = ", ".join(sorted(line.rank for line in candidates))
        return f"received by rank {received.rank}, sent by {ranks}: ranks must be as many"
    if len(matching) > 1:
        return "sent more than once under one name"
    sent = matching[0]
    if sent.layout != received.layout:
        return f"caches differ: sent from {sent.layout}; received in {received.layout}"
    if received.has_replicas:
        return "heads are held by several ranks, which share the work of sending them"
    if sent.num_tokens != received.num_tokens:
        return f"{sent.num_tokens} tokens were sent, {received.num_tokens} received"
    return ""


def _by_block(line: Line) -> Digests:
    return {
        (layer, block): digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
        for group in line.groups
        for layer, digests in group.layers.items()
        for at, block in enumerate(group.blocks)
    }


def as_text(found: Comparison) -> str:
    """For people: the counts, what was left out and why, and the first differences."""
    lines = [
        f"{len(found.requests)} requests compared: {found.num_blocks:,} blocks of layers, "
        f"{found.num_bytes:,} bytes, {len(found.differences):,} differences"
    ]
    if found.num_unread:
        lines.append(
            f"{found.num_unread:,} more blocks of layers of the senders were not taken (cached, or "
            "outside of a window)"
        )
    if found.num_sent_alone:
        lines.append(f"{found.num_sent_alone} requests have a sender's digests alone")
    if found.num_received_alone:
        lines.append(f"{found.num_received_alone} requests have a receiver's digests alone")
    lines += [f"not comparable, {count}: {why}" for why, count in found.not_comparable.items()]
    lines += [f"DIFFERENT  {one}" for one in found.differences[:MAX_NAMED]]
    if len(found.differences) > MAX_NAMED:
        lines.append(f"... and {len(found.differences) - MAX_NAMED:,} more")
    return "\n".join(lines)


def main() -> int:
    """Read, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path, help="folders, or files of digests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what was found")
    args = parser.parse_args()
    try:
        files = files_below(args.logs)
        found = compare((path.parent, line) for path in files for line in read_lines(path))
        if args.json is not None:
            write_whole(args.json, json.dumps(found.as_json(), indent=2).encode() + b"\n")
    except InvalidUsage as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNREADABLE
    sys.stdout.write(f"{as_text(found)}\n")
    return found.status


if __name__ == "__main__":
    sys.exit(main())
