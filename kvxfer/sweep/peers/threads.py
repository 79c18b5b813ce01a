"""Pages shared among threads, each part copied by a call that lets go of Python's lock."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


class Threads:
    """A few threads that take parts of a copy; the caller is one of them."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._executor = ThreadPoolExecutor(max(num_threads - 1, 1))

    def run(self, copy: Callable[[slice], None], parts: Sequence[slice]) -> None:
        """Copy all parts; raises what a copy raises."""
        own, *others = [parts[index :: self.num_threads] for index in range(self.num_threads)]

        def copy_all(mine: Sequence[slice]) -> None:
            for part in mine:
                copy(part)

        started = [self._executor.submit(copy_all, mine) for mine in others]
        try:
            copy_all(own)
        finally:
            for one in started:
                one.result()

    def close(self) -> None:
        """End them."""
        self._executor.shutdown()


def parts_of(count: int, length: int) -> list[slice]:
    """``count`` items in parts of ``length``."""
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]
