"""Compute beside a transfer: what a move of pages costs the GPU it shares.

torch is imported here and only when a load is asked for.
"""

import statistics
import threading
from collections import deque
from typing import Any

from kvxfer.errors import InvalidUsage, NotAvailable

KINDS = ("gemm", "decode")
_GEMM_SIZE = 8192
_DECODE_ROWS = 1 << 16
_DECODE_COLUMNS = 8192
_WARMUP = 3
# Operations kept queued, so that the GPU is never idle between two and the times are back to back.
_QUEUED = 4


class ComputeLoad:
    """Runs one operation again and again on a stream of its own until closed.

    ``gemm``: a bf16 matrix product of 8192 x 8192 x 8192, bound by arithmetic. ``decode``: a bf16
    matrix (1 GiB) times a vector, bound by memory, as the decode step of a model is.
    """

    def __init__(self, kind: str, device: int) -> None:
        """Start the load on CUDA ``device`` and return once it runs.

        Raises:
            InvalidUsage: an unknown kind.
            NotAvailable: torch with CUDA is not installed.
        """
        if kind not in KINDS:
            raise InvalidUsage(f"compute {kind!r}; use {' or '.join(KINDS)}")
        self._torch = _import_torch()
        self._times_us: list[float] = []
        self._stop = threading.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(kind, device), daemon=True)
        self._thread.start()
        self._started.wait(60.0)
        self._raise_failure()

    def reset(self) -> None:
        """Forget the times so far."""
        self._times_us.clear()

    def median_us(self) -> float:
        """Median time of an operation since the start or the last :meth:`reset`; 0 for none."""
        times = list(self._times_us)
        return statistics.median(times) if times else 0.0

    def close(self) -> float:
        """Stop; returns :meth:`median_us`.

        Raises:
            NotAvailable: the load failed.
        """
        self._stop.set()
        self._thread.join(30.0)
        self._raise_failure()
        return self.median_us()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise NotAvailable(f"the compute load failed: {self._failure}") from self._failure

    def _run(self, kind: str, device: int) -> None:
        try:
            self._loop(kind, device)
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()

    def _loop(self, kind: str, device: int) -> None:
        torch = self._torch
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            operate = _operation(torch, kind, device)
            for _ in range(_WARMUP):
                operate()
            torch.cuda.current_stream().synchronize()
            self._started.set()
            ends: deque[Any] = deque()
            while not self._stop.is_set():
                operate()
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
                if len(ends) > _QUEUED:
                    ends[1].synchronize()
                    self._times_us.append(ends.popleft().elapsed_time(ends[0]) * 1000.0)
            torch.cuda.current_stream().synchronize()


def _operation(torch: Any, kind: str, device: int) -> Any:
    def random(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.bfloat16, device=f"cuda:{device}")

    if kind == "gemm":
        left, right = random(_GEMM_SIZE, _GEMM_SIZE), random(_GEMM_SIZE, _GEMM_SIZE)
        product = torch.empty_like(left)
        return lambda: torch.matmul(left, right, out=product)
    matrix, vector = random(_DECODE_ROWS, _DECODE_COLUMNS), random(_DECODE_COLUMNS)
    column = torch.empty(_DECODE_ROWS, dtype=torch.bfloat16, device=f"cuda:{device}")
    return lambda: torch.mv(matrix, vector, out=column)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise NotAvailable("--with-compute needs torch; pip install '.[torch]'") from error
    if not torch.cuda.is_available():
        raise NotAvailable("--with-compute needs a torch that sees a CUDA GPU")
    return torch
