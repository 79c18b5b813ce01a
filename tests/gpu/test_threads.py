"""Threads: those that never met CUDA, several at once, and what they leave current behind them."""

import threading
from collections.abc import Callable
from typing import Any

import cuda_driver
from cache_content import shape
from device_host import DeviceHost
from gpu_pairs import DeviceChild, linked_devices
from peer_process import DEADLINE_S

from kvxfer import Endpoint, KVCache, KVLayout, _core
from kvxfer.transport import Tuning

CACHE = shape(block_size=64)
ALL_BLOCKS = list(range(16))
NUM_POLLS = 10_000


def in_new_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a thread of its own; its error is raised here."""
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    assert outcome, "the thread hangs"
    return outcome[0]


def open_local() -> DeviceHost:
    host = DeviceHost()
    host.open(
        layout=CACHE.fields, num_blocks=16, num_arrays=1, memory="cuda", transport="nvlink", seed=1
    )
    return host


def test_a_handshake_in_a_new_thread_takes_the_same_path(child: DeviceChild) -> None:
    opened = child.open(CACHE, memory="cuda", transport="nvlink", seed=2)
    local = open_local()
    try:
        with local.endpoint.connect(opened["addresses"]) as peer:
            expected = peer.put([0], [1]).actual_path

        def meet_and_move() -> str:
            assert cuda_driver.current_context() == 0
            with local.endpoint.connect(opened["addresses"]) as peer:
                transfer = peer.put([0, 2, 4], [1, 3, 5])
                transfer.wait(DEADLINE_S)
                return transfer.actual_path

        assert in_new_thread(meet_and_move) == expected
        child.call("copied_in", src_seed=1, src_ids=[0, 2, 4], dst_ids=[1, 3, 5])
        assert child.call("problem") == ""
    finally:
        local.close()
        child.call("close")


def test_everything_may_begin_in_a_new_thread(child: DeviceChild) -> None:
    opened = child.open(CACHE, memory="cuda", transport="nvlink", seed=2)

    def begin_and_end() -> str:
        memory = _core.DeviceBuffer(0, CACHE.array_bytes)
        with (
            KVCache(KVLayout(**CACHE.fields), memory) as cache,
            Endpoint(cache, transport="nvlink") as endpoint,
            endpoint.connect(opened["addresses"]) as peer,
        ):
            peer.get(ALL_BLOCKS, ALL_BLOCKS).wait(DEADLINE_S)
            found = cuda_driver.read(0, memory.address, CACHE.array_bytes)
        pages = CACHE.pages(CACHE.content(2))
        return "" if found.tobytes() == pages.tobytes() else "other bytes came"

    assert in_new_thread(begin_and_end) == ""
    child.call("close")


def test_many_polls_from_new_threads(child: DeviceChild) -> None:
    with linked_devices(child, CACHE) as pair:
        pair.post_faulty(ALL_BLOCKS, ALL_BLOCKS, _core.CopyFault.DELAY_BLOCK_0)
        transfer = pair.peer.put([3], [4])

        def poll() -> int:
            return sum(transfer.poll(0.0) for _ in range(NUM_POLLS))

        in_new_thread(lambda: transfer.wait(DEADLINE_S) or True)
        assert in_new_thread(poll) == NUM_POLLS
        assert in_new_thread(poll) == NUM_POLLS


def test_nothing_changes_the_current_context(child: DeviceChild) -> None:
    opened = child.open(CACHE, memory="cuda", transport="nvlink", seed=2)
    cuda_driver.make_current(0)
    before = cuda_driver.current_context()
    assert before != 0

    def check(what: str) -> None:
        assert cuda_driver.current_context() == before, what

    memory = _core.DeviceBuffer(0, CACHE.array_bytes)
    check("DeviceBuffer")
    cache = KVCache(KVLayout(**CACHE.fields), memory)
    check("KVCache")
    endpoint = Endpoint(cache, transport="nvlink")
    check("Endpoint")
    peer = endpoint.connect(opened["addresses"])
    check("connect")
    for engine in ("bulk", "load_store", "dma"):
        transfer = peer.put([0], [1], tuning=Tuning(engine=engine), after=0)
        check(f"put, {engine}")
        transfer.wait()
        check("wait")
    peer.close()
    check("Peer.close")
    endpoint.close()
    cache.close()
    del memory
    check("close")
    child.call("close")


def test_a_changed_context_would_be_seen() -> None:
    def change() -> tuple[int, int]:
        before = cuda_driver.current_context()
        cuda_driver.make_current(0)
        return before, cuda_driver.current_context()

    before, after = in_new_thread(change)
    assert before == 0
    assert after != 0


def test_transfers_of_several_threads_are_all_signalled(child: DeviceChild) -> None:
    num_threads, num_puts = 4, 50
    with linked_devices(child, CACHE) as pair:

        def work(first: int) -> None:
            for turn in range(num_puts):
                pair.peer.put([(first + turn) % 16], [first]).wait(DEADLINE_S)

        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert pair.signalled(num_threads * num_puts)
        assert not pair.signalled(num_threads * num_puts + 1)
        last = [(n + num_puts - 1) % 16 for n in range(num_threads)]
        child.call("copied_in", src_seed=1, src_ids=last, dst_ids=list(range(num_threads)))
        pair.check()


def test_links_of_several_threads_do_not_disturb_each_other(child: DeviceChild) -> None:
    opened = child.open(CACHE, memory="cuda", transport="nvlink", seed=2)
    hosts = [open_local() for _ in range(4)]
    expected = CACHE.content(2)
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(5):
            with hosts[index].endpoint.connect(opened["addresses"]) as peer:
                peer.get(ALL_BLOCKS, ALL_BLOCKS).wait(DEADLINE_S)
        pages = CACHE.pages(hosts[index].content())
        if pages.tobytes() != CACHE.pages(expected).tobytes():
            wrong.append(index)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert wrong == []
    finally:
        for host in hosts:
            host.close()
        child.call("close")
