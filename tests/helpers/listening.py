"""Where a process listens."""

import socket
import struct
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"  # a state in /proc/net/tcp


def listening_hosts(pid: int) -> set[str]:
    """Addresses that a process listens on over TCP."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing of the folder itself
            inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
    hosts = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                swapped = b"".join(
                    struct.pack(">I", *struct.unpack("<I", words[at : at + 4]))
                    for at in range(0, len(words), 4)
                )
                hosts.add(socket.inet_ntop(family, swapped))
    return hosts
