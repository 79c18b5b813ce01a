"""How much memory this process may still take."""

from pathlib import Path

from kvxfer.errors import NotAvailable
from kvxfer.units import format_bytes

_HEADROOM_BYTES = 512 << 20
_REMEDY = "use fewer --tokens or a smaller --total-bytes"
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def require_host_memory(num_bytes: int, *, remedy: str = _REMEDY) -> None:
    """Check that ``num_bytes`` can be allocated, with some to spare.

    Args:
        num_bytes: of all pools together.
        remedy: what whoever asks for them can do about it.

    Raises:
        NotAvailable: they cannot.
    """
    free_bytes = free_host_bytes()
    if num_bytes + _HEADROOM_BYTES > free_bytes:
        raise NotAvailable(
            f"pools of {format_bytes(num_bytes)} with {format_bytes(free_bytes)} of memory free, "
            f"of which {format_bytes(_HEADROOM_BYTES)} are left alone; {remedy}"
        )


def free_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """What the host has free, or the limit of this process's container (cgroup v2) if less."""
    available = _fields(meminfo)["MemAvailable:"] * 1024
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        # Files that nobody has used lately count as used, but give way.
        idle = _fields(cgroup / "memory.stat").get("inactive_file", 0)
    except (OSError, ValueError):  # there is none, or it is "max"
        return available
    return max(min(available, limit - used + idle), 0)


def _fields(path: Path) -> dict[str, int]:
    lines = path.read_text(encoding="ascii").splitlines()
    return {name: int(value) for name, value, *_ in map(str.split, lines)}
