"""The pool of blocks: all or nothing, in order, each block to one request."""

import random
import threading

import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.session.block_pool import BlockPool

PEER = "p-1"


def test_blocks_come_in_order_and_return_behind_the_others() -> None:
    pool = BlockPool(6)
    assert pool.reserve(PEER, "a", 2) == [0, 1]
    assert pool.reserve(PEER, "b", 2) == [2, 3]
    pool.release(PEER, "a")
    assert pool.reserve(PEER, "c", 4) == [4, 5, 0, 1]
    pool.release(PEER, "b")
    pool.release(PEER, "c")
    assert pool.reserve(PEER, "d", 6) == [2, 3, 4, 5, 0, 1]


def test_a_reservation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.reserve(PEER, "first", 2) is not None
    # Two requests of two blocks in a pool of three: neither holds a half that the other needs.
    assert pool.reserve(PEER, "second", 2) is None
    assert pool.num_free == 1
    pool.release(PEER, "first")
    assert pool.reserve(PEER, "second", 2) == [2, 0]


def test_a_request_that_waits_holds_nothing() -> None:
    pool = BlockPool(2)
    pool.reserve(PEER, "first", 2)
    assert pool.reserve(PEER, "second", 1) is None
    with pytest.raises(InvalidUsage, match="'second' holds no blocks; reserve them first"):
        pool.commit(PEER, "second")


def test_a_repeated_reservation_is_the_same_one() -> None:
    pool = BlockPool(4)
    assert pool.reserve(PEER, "a", 3) == [0, 1, 2]
    assert pool.reserve(PEER, "a", 3) == [0, 1, 2]
    assert pool.num_free == 1
    for other in (1, 2, 4):
        message = f"'a' already holds 3 blocks and wants {other}; use a new id, or abort it"
        with pytest.raises(InvalidUsage, match=message):
            pool.reserve(PEER, "a", other)
    assert pool.num_free == 1


def test_more_than_the_pool_is_refused_and_not_waited_for() -> None:
    pool = BlockPool(4)
    pool.reserve(PEER, "a", 4)
    with pytest.raises(InvalidUsage, match="'b' wants 5 blocks of a pool of 4; it can never be"):
        pool.reserve(PEER, "b", 5)


def test_commit_keeps_the_blocks_until_they_are_released() -> None:
    pool = BlockPool(4)
    pool.reserve(PEER, "a", 3)
    assert pool.commit(PEER, "a") == [0, 1, 2]
    assert pool.commit(PEER, "a") == [0, 1, 2]
    assert pool.num_free == 1
    pool.release(PEER, "a")
    assert pool.num_free == 4


def test_release_frees_once() -> None:
    pool = BlockPool(4)
    pool.reserve(PEER, "a", 3)
    for _ in range(3):
        pool.release(PEER, "a")
    pool.release(PEER, "never reserved")
    assert pool.num_free == 4
    assert sorted(pool.reserve(PEER, "b", 4) or []) == [0, 1, 2, 3]


def test_abort_frees_what_is_not_committed_and_once() -> None:
    pool = BlockPool(4)
    pool.reserve(PEER, "a", 3)
    for _ in range(3):
        pool.abort(PEER, "a")
    pool.abort(PEER, "never reserved")
    assert pool.num_free == 4
    assert sorted(pool.reserve(PEER, "b", 4) or []) == [0, 1, 2, 3]


def test_abort_of_a_committed_request_frees_nothing() -> None:
    pool = BlockPool(4)
    pool.reserve(PEER, "a", 3)
    pool.commit(PEER, "a")
    pool.abort(PEER, "a")
    assert pool.num_free == 1
    assert pool.commit(PEER, "a") == [0, 1, 2]
    pool.release(PEER, "a")
    assert pool.num_free == 4
    # The next request of that id is not committed by what its predecessor was.
    pool.reserve(PEER, "a", 3)
    pool.abort(PEER, "a")
    assert pool.num_free == 4


def test_equal_ids_of_two_peers_are_two_requests() -> None:
    pool = BlockPool(6)
    assert pool.reserve("p-1", "r", 2) == [0, 1]
    assert pool.reserve("p-2", "r", 2) == [2, 3]
    pool.commit("p-1", "r")
    pool.abort("p-2", "r")
    with pytest.raises(InvalidUsage, match="'r' holds no blocks"):
        pool.commit("p-2", "r")
    assert pool.num_free == 4
    pool.release("p-2", "r")
    assert pool.num_free == 4


def test_what_a_caller_does_to_its_list_is_its_own_affair() -> None:
    pool = BlockPool(4)
    for blocks in (
        pool.reserve(PEER, "a", 2),
        pool.reserve(PEER, "a", 2),
        pool.commit(PEER, "a"),
    ):
        assert blocks == [0, 1]
        blocks.append(3)
    pool.release(PEER, "a")
    assert pool.num_free == 4


def test_an_id_may_be_used_again_after_its_release() -> None:
    pool = BlockPool(2)
    for _ in range(1000):
        assert pool.reserve(PEER, "same", 2) is not None
        pool.commit(PEER, "same")
        pool.release(PEER, "same")
    assert pool.num_free == 2


@pytest.mark.parametrize("seed", range(5))
def test_any_course_of_calls_agrees_with_a_list_of_owners(seed: int) -> None:
    random_ = random.Random(seed)
    pool, owners = BlockPool(24), [""] * 24
    committed: set[str] = set()
    for _ in range(2000):
        request = f"r{random_.randrange(8)}"
        held = [block for block, owner in enumerate(owners) if owner == request]
        if random_.random() < 0.5:
            wanted = len(held) or random_.randrange(1, 10)
            if request in committed:
                with pytest.raises(InvalidUsage, match="is committed"):
                    pool.reserve(PEER, request, wanted)
                continue
            blocks = pool.reserve(PEER, request, wanted)
            if blocks is None:
                assert owners.count("") < wanted
                continue
            assert len(blocks) == wanted
            assert all(owners[block] in ("", request) for block in blocks)
            for block in blocks:
                owners[block] = request
        elif held and random_.random() < 0.5:
            assert sorted(pool.commit(PEER, request)) == held
            committed.add(request)
        else:
            pool.release(PEER, request)
            committed.discard(request)
            owners = ["" if owner == request else owner for owner in owners]
        assert pool.num_free == owners.count("")


def test_threads_never_hold_one_block_at_a_time() -> None:
    pool = BlockPool(16)
    holders = [0] * 16
    failures: list[str] = []

    def work(name: str) -> None:
        for turn in range(400):
            blocks = pool.reserve(PEER, f"{name}-{turn}", 1 + turn % 5)
            if blocks is None:
                continue
            for block in blocks:
                holders[block] += 1
            if any(holders[block] != 1 for block in blocks):
                failures.append(f"{name}-{turn}: {blocks}")
            for block in blocks:
                holders[block] -= 1
            pool.release(PEER, f"{name}-{turn}")

    threads = [threading.Thread(target=work, args=(f"t{n}",), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert pool.num_free == 16


def test_a_committed_request_cannot_be_reserved_again() -> None:
    pool = BlockPool(4)
    pool.reserve("p", "r", 2)
    pool.commit("p", "r")
    with pytest.raises(InvalidUsage, match="request 'r' is committed and its blocks are in use"):
        pool.reserve("p", "r", 2)
    pool.release("p", "r")
    assert pool.reserve("p", "r", 2) is not None
