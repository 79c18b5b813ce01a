"""One line about a point, in the client's own figures; the report works from the raw times."""

import json
from pathlib import Path

from kvxfer.errors import InvalidUsage
from kvxfer.pd.result import PDPoint, bench_path
from kvxfer.pd.vllm_json import MAX_RESULT_BYTES
from kvxfer.whole_file import read_bounded


def headline(point: PDPoint, folder: Path) -> str:
    """TTFT and ITL in ms, requests a second, and what failed.

    Raises:
        InvalidUsage: the client's JSON cannot be read.
    """
    path = bench_path(folder, point)
    try:
        result = json.loads(read_bounded(path, MAX_RESULT_BYTES))
        ttft = f"TTFT p50 {result['p50_ttft_ms']:.1f}, p99 {result['p99_ttft_ms']:.1f} ms"
        itl = f"ITL p50 {result['p50_itl_ms']:.1f}, p99 {result['p99_itl_ms']:.1f} ms"
        rate = f"{result['request_throughput']:.2f} requests/s"
        failed = int(result["failed"])
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidUsage(f"{path} is no result of the client: {error!r}") from error
    parts = [ttft, *([itl] if point.osl > 1 else []), rate]
    if failed:
        parts.append(f"{failed} of {point.num_prompts} FAILED")
    return ", ".join(parts)
