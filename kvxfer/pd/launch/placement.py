"""Where each engine runs: which GPUs, or which cores of a CPU."""

from collections.abc import Iterator, Sequence

from kvxfer.env import visible_devices
from kvxfer.errors import InvalidUsage


def gpu_environments(
    ranks: Sequence[int], devices: Sequence[int]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """For each engine the names of its GPUs, and the variables that make them its first.

    The other engines' GPUs follow: a copy over NVLink needs both ends visible to who runs it.

    Args:
        ranks: of each engine, how many.
        devices: indices into what is visible here, one a rank; empty = the first ones.

    Raises:
        InvalidUsage: an index is beyond what ``CUDA_VISIBLE_DEVICES`` lists here.
    """
    visible = visible_devices()
    indices = list(devices) or list(range(sum(ranks)))
    if visible is not None and max(indices) >= len(visible):
        raise InvalidUsage(
            f"device {max(indices)} is not among the {len(visible)} of CUDA_VISIBLE_DEVICES; "
            "name others with --devices"
        )
    names = [str(index) if visible is None else visible[index] for index in indices]
    first = 0
    for count in ranks:
        own = names[first : first + count]
        first += count
        others = [name for name in names if name not in own]
        yield own, {"CUDA_VISIBLE_DEVICES": ",".join([*own, *others])}


def cpu_environments(
    ranks: Sequence[int], cores: Sequence[int]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """For each engine the names of its core sets and the variables that bind its threads there.

    Engines that share cores wait for each other's threads at every operation, so each rank gets
    cores of its own.

    Args:
        ranks: of each engine, how many.
        cores: those that this process may use.

    Raises:
        InvalidUsage: there are more ranks than cores.
    """
    total = sum(ranks)
    if len(cores) < total:
        raise InvalidUsage(
            f"{total} ranks on {len(cores)} cores; each needs a core of its own, so start fewer "
            "engines or lower tensor-parallel sizes"
        )
    shares = [
        ",".join(map(str, cores[rank * len(cores) // total : (rank + 1) * len(cores) // total]))
        for rank in range(total)
    ]
    first = 0
    for count in ranks:
        own = shares[first : first + count]
        first += count
        yield [f"cpu {share}" for share in own], {"VLLM_CPU_OMP_THREADS_BIND": "|".join(own)}
