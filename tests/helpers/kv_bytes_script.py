"""``bench/kv_bytes.py`` as a program, and changes to the digests that it reads."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from bench_scripts import script

from kvxfer.connectors.vllm.digests import Line, read_lines


def run(*places: Path, json_file: Path | None = None) -> tuple[int, str, Any]:
    """Exit status, what it says, and what it wrote."""
    words = [sys.executable, str(script("kv_bytes")), *map(str, places)]
    words += ["--json", str(json_file)] if json_file else []
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd="/")
    written = json.loads(json_file.read_text()) if json_file and json_file.exists() else None
    return done.returncode, done.stdout + done.stderr, written


def rewrite(path: Path, change: Callable[[Line], Line]) -> None:
    """Put what ``change`` makes of each line in the place of a file's lines."""
    lines = [change(line) for line in read_lines(path)]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def flip(line: Line, layer: str, at: int) -> Line:
    """With another digest of the block ``at`` of those that a layer has."""
    for group in line.groups:
        if layer in group.layers:
            raw = bytearray(group.layers[layer])
            raw[16 * at] ^= 1
            group.layers[layer] = bytes(raw)
    return line
