"""Two caches in private memory of a process that the kernel denies cross-memory attach.

python denied_attach.py lenient|strict: prints the path that ``auto`` takes between them, after a
transfer was checked, or the error.
"""

import ctypes
import errno
import logging
import platform
import struct
import sys

import numpy as np

from kvxfer import Endpoint, KVCache, KVLayout
from kvxfer.errors import KvxferError

LAYOUT = KVLayout(2, 2, head_dim=16, dtype="uint8", block_size=4)
NUM_BLOCKS = 4
# process_vm_readv, process_vm_writev.
_CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
# Classic BPF: load the number of the call, compare, return.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000


def deny() -> None:
    """Have both calls fail with EPERM, as a container's profile does."""
    read, write = _CALLS[platform.machine()]
    program = [
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 1, 0, read),
        (_JUMP_IF_EQUAL, 0, 1, write),
        (_RETURN, 0, 0, _FAIL_WITH | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    kept = ctypes.create_string_buffer(code)
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(kept)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_, 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def cache_of(value: int) -> tuple[np.ndarray, KVCache]:
    memory = np.full(NUM_BLOCKS * LAYOUT.block_bytes, value, np.uint8)
    return memory, KVCache(LAYOUT, memory)


def main() -> None:
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s: %(message)s")
    deny()
    far_memory, far = cache_of(1)
    _, near = cache_of(2)
    with (
        Endpoint(far, transport="auto") as there,
        Endpoint(near, transport="auto", strict=sys.argv[1] == "strict") as here,
    ):
        try:
            with here.connect(there.addresses) as peer:
                path = peer.put([0], [0])
                path.wait(10.0)
                assert np.count_nonzero(far_memory == 2) == LAYOUT.block_bytes
                print(path.actual_path)
        except KvxferError as error:
            print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
