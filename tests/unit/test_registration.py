"""The table of registered ranges: shared, overlapping, replaced, and alive."""

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from fake_arrays import CUDA, FakeTensor

from kvxfer import _core
from kvxfer.errors import InvalidUsage, RegistrationError
from kvxfer.memory import Registration, register

ADDRESS = 0x7E00_0000_0000


def make(num_bytes: int = 4096) -> Any:
    return np.zeros(num_bytes, np.uint8)


def test_a_range_is_registered_until_it_is_closed() -> None:
    array = make()
    with register(array) as made:
        assert not made.closed
        assert made.buffer.address == array.ctypes.data
        made.require_live()
    assert made.closed
    with pytest.raises(RegistrationError, match=r"\[0x[0-9a-f]+, 0x[0-9a-f]+\) is no longer regis"):
        made.require_live()


def test_the_same_range_twice_is_shared_until_the_second_is_closed() -> None:
    array = make()
    first, second = register(array), register(array[:])
    first.close()
    with pytest.raises(RegistrationError, match="is no longer registered"):
        first.require_live()
    second.require_live()
    # Still taken: what overlaps it otherwise is refused.
    with pytest.raises(RegistrationError, match="overlaps"):
        register(array[1:])
    second.close()
    register(array[1:]).close()


def test_closing_twice_gives_the_right_back_once() -> None:
    array = make()
    first, second = register(array), register(array)
    first.close()
    first.close()
    first.close()
    second.require_live()
    with pytest.raises(RegistrationError, match="overlaps"):
        register(array[1:])
    second.close()


@pytest.mark.parametrize(
    ("begin", "end"),
    [(1000, 2001), (0, 1001), (1999, 4096), (1200, 1300), (0, 4096), (1000, 1999), (1001, 2000)],
)
def test_a_range_that_overlaps_another_is_refused(begin: int, end: int) -> None:
    array = make()
    with register(array[1000:2000]) as held:
        with pytest.raises(RegistrationError) as caught:
            register(array[begin:end])
        for part in (
            "overlaps the registered host memory",
            f"{held.buffer.address:#x}, {held.buffer.end:#x}",
            f"{array.ctypes.data + begin:#x}",
            "register the whole range once, or close the other registration first",
        ):
            assert part in str(caught.value)
        held.require_live()
    register(array[begin:end]).close()


def test_neighbours_do_not_overlap() -> None:
    array = make()
    with register(array[1000:2000]), register(array[:1000]), register(array[2000:]):
        pass


def test_another_size_is_fine_once_the_first_is_closed() -> None:
    array = make()
    with register(array[:1000]) as short:
        with pytest.raises(RegistrationError, match="overlaps"):
            register(array)
        short.close()
        with register(array) as whole:
            assert whole.buffer.num_bytes == 4096
            with pytest.raises(RegistrationError, match="overlaps"):
                register(array[:1000])


def test_a_refused_array_leaves_no_trace() -> None:
    array = make()
    frozen = array.view()
    frozen.setflags(write=False)
    with pytest.raises(InvalidUsage, match="read-only"):
        register(frozen)
    with register(array[:10]):
        for _ in range(3):
            with pytest.raises(RegistrationError):
                register(array)
    register(array).close()


def test_a_registration_keeps_its_array_alive() -> None:
    array = make(1 << 20)
    alive = weakref.ref(array)
    held = register(array)
    del array
    gc.collect()
    assert alive() is not None
    held.require_live()
    held.close()
    del held
    gc.collect()
    assert alive() is None


def test_a_shared_registration_keeps_the_memory_alive_after_the_first_is_gone() -> None:
    array = make(1 << 20)
    alive = weakref.ref(array)
    first, second = register(array), register(array[:])
    first.close()
    del first, array
    gc.collect()
    assert alive() is not None
    second.close()
    del second
    gc.collect()
    assert alive() is None


def test_a_registration_that_is_dropped_is_not_given_back() -> None:
    # Peers may still hold its address, so only close() frees it.
    array = make()
    alive = weakref.ref(array)
    held = [register(array)]
    again = register(array)
    held.clear()
    gc.collect()
    again.close()
    with pytest.raises(RegistrationError, match="overlaps"):
        register(array[1:])
    assert alive() is not None


def test_threads_share_a_range_and_give_it_back() -> None:
    array = make()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                with register(array) as held:
                    held.require_live()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    register(array[1:]).close()


@pytest.fixture
def buffer_ids(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Which allocation lies at an address, as CUDA would say: to be changed by a test."""
    ids: dict[int, int] = {}

    def buffer_id(address: int) -> int:
        if address not in ids:
            raise RegistrationError(f"address {address} is not live device memory")
        return ids[address]

    monkeypatch.setattr(_core, "buffer_id", buffer_id)
    return ids


def device_tensor(num_items: int = 512) -> FakeTensor:
    return FakeTensor(ADDRESS, (num_items,), device=(CUDA, 0))


def test_device_memory_at_a_reused_address_is_not_the_registered_one(
    buffer_ids: dict[int, int],
) -> None:
    buffer_ids[ADDRESS] = 41
    first: Registration = register(device_tensor())
    first.require_live()
    buffer_ids[ADDRESS] = 42  # freed, and allocated anew at the same place
    with pytest.raises(RegistrationError, match=r"allocated anew since.*register it again"):
        first.require_live()
    with pytest.raises(RegistrationError, match=r"freed and allocated anew while.*close the old"):
        register(device_tensor())
    first.close()
    with register(device_tensor()) as second:
        second.require_live()


def test_device_memory_that_was_freed_is_dead(buffer_ids: dict[int, int]) -> None:
    buffer_ids[ADDRESS] = 41
    with register(device_tensor()) as held:
        del buffer_ids[ADDRESS]
        with pytest.raises(RegistrationError, match="not live device memory"):
            held.require_live()
        with pytest.raises(RegistrationError, match="not live device memory"):
            register(device_tensor())


def test_host_and_device_addresses_do_not_overlap(buffer_ids: dict[int, int]) -> None:
    buffer_ids[ADDRESS] = 41
    with (
        register(device_tensor()),
        register(FakeTensor(ADDRESS, (512,))) as host,
        pytest.raises(RegistrationError, match=r"device memory.*overlaps the registered device"),
    ):
        register(device_tensor(256))
    assert host.closed
