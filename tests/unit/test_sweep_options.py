"""What the words of ``kvxfer sweep`` become, where ranks are swept."""

import argparse

import pytest
from rich.progress import Progress

from kvxfer.cli import sweep
from kvxfer.cli.sweep_ranks import parse_devices
from kvxfer.errors import InvalidUsage
from kvxfer.layout import CATALOGUE, KVKind, Order
from kvxfer.sweep import SweepOptions
from kvxfer.sweep.cases import expand_cases
from kvxfer.transport import TRANSPORTS


def options_of(*words: str) -> SweepOptions:
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    return sweep.parse_options(parser.parse_args(["--transport", "shm", *words]))


def test_every_transport_may_be_asked_for() -> None:
    for name in TRANSPORTS:
        assert options_of("--tokens", "16", "--transport", name).transport == name


def test_memory_makes_no_difference_where_it_is_not_mapped() -> None:
    assert options_of("--transport", "ucx").memory == ("private",)
    assert options_of("--transport", "ucx", "--memory", "shared").memory == ("shared",)


def test_one_pair_is_the_default() -> None:
    options = options_of()
    assert options.ranks is None
    assert options.memory == ("shared", "private")
    assert options.tokens == (512, 2048, 8192)


@pytest.mark.parametrize("words", [["--tp", "2:1"], ["--pp", "2:1"], ["--layouts"]])
def test_ranks_take_smaller_defaults_on_a_host(words: list[str]) -> None:
    options = options_of(*words)
    assert (options.memory, options.tokens) == (("shared",), (512,))
    quick = options_of(*words, "--quick", "--memory", "private")
    assert (quick.memory, quick.tokens, quick.iters) == (("private",), (256,), 5)
    assert options_of(*words, "--tokens", "7").tokens == (7,)


def test_on_gpus_a_request_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "resolve_transport", lambda _: "nvlink")
    assert options_of("--tp", "2:1").tokens == (8192,)
    assert options_of("--tp", "2:1", "--quick").tokens == (2048,)


def test_a_request_of_less_than_a_page_is_refused() -> None:
    options = options_of("--page-bytes", "1k,4k", "--total-bytes", "1k")
    with pytest.raises(InvalidUsage, match=r"1 KiB is less than a page of 4 KiB; raise --total-by"):
        expand_cases(options, transport="shm")


def test_a_size_of_no_ranks_says_what_is_wrong() -> None:
    with pytest.raises(InvalidUsage, match="--tp: '0:1' has a size of 0; use 1 or more"):
        options_of("--tp", "0:1")


def test_sizes_and_heads() -> None:
    ranks = options_of("--tp", "1:1, 6:4", "--pp", "2:1", "--kv-heads", "8,2").ranks
    assert ranks is not None
    assert (ranks.tp, ranks.pp, ranks.kv_heads) == (((1, 1), (6, 4)), ((2, 1),), (8, 2))
    assert ranks.layouts == ()


def test_layouts_take_what_they_do_not_say_from_the_other_options() -> None:
    words = ("--block-size", "32", "--dtype", "float16", "--order", "hnd")
    ranks = options_of(*words, "--layouts", "kv=packed", "lmcache", "dtype=fp8,block=8").ranks
    assert ranks is not None
    model = CATALOGUE["llama-3.1-8b"].kv_layout()
    found = [choice.of(model) for choice in ranks.layouts]
    assert [(one.order, one.kv, one.block_size, one.dtype) for one in found] == [
        (Order.HND, KVKind.PACKED, 32, "float16"),
        (Order.NHD, KVKind.CHUNKED, 256, "float16"),
        (Order.HND, KVKind.SPLIT, 8, "fp8_e4m3"),
    ]
    assert all(choice.as_source for choice in ranks.layouts)
    assert {(one.num_layers, one.num_kv_heads) for one in found} == {(32, 8)}


def test_what_is_named_twice_is_swept_once() -> None:
    options = options_of("--tp", "1:1,2:1, 1:1", "--tokens", "64,64", "--op", "put,get,put")
    assert options.ranks is not None
    assert options.ranks.tp == ((1, 1), (2, 1))
    assert (options.tokens, options.ops) == ((64,), ("put", "get"))


def test_a_quick_look_has_fewer_layouts() -> None:
    ranks = options_of("--layouts", "--quick").ranks
    assert ranks is not None
    assert [choice.name for choice in ranks.layouts] == ["", "order=hnd", "vllm-cpu", "fp8_e4m3"]
    named = options_of("--layouts", "lmcache", "--quick").ranks
    assert named is not None
    assert [choice.name for choice in named.layouts] == ["lmcache"]


@pytest.mark.parametrize("option", ["--devices", "--with-compute"])
def test_an_empty_value_is_refused(option: str) -> None:
    with pytest.raises(InvalidUsage, match=f"{option}: ''; write"):
        options_of(option, "")


def test_rounds_of_a_second_measurement_do_not_count() -> None:
    bar = Progress(disable=True)
    task = bar.add_task("", total=8)
    for _ in range(6):
        sweep.advance(bar, task, 4)
    assert bar.tasks[task].completed == 4
    sweep.advance(bar, task, 8)
    assert bar.tasks[task].completed == 5


@pytest.mark.parametrize(("dtype", "converts"), [("bfloat16", True), ("float32", False)])
def test_the_usual_layouts_end_with_fp8_where_it_can_be_written(dtype: str, converts: bool) -> None:
    ranks = options_of("--layouts", "--dtype", dtype).ranks
    assert ranks is not None
    assert [choice.as_source for choice in ranks.layouts] == [True] * 6 + [False] * converts


@pytest.mark.parametrize(
    ("text", "devices"),
    [("0,1", ((0,), (1,))), (" 0 , 0 ", ((0,), (0,))), ("0:1", ((0,), (1,))),
     ("0,1:2,3", ((0, 1), (2, 3))), ("0:1,2,3", ((0,), (1, 2, 3)))],
)  # fmt: skip
def test_devices(text: str, devices: object) -> None:
    assert parse_devices(text) == devices


@pytest.mark.parametrize(
    "text", ["0", "0,1,2", ":", "0:", "0:1:2", "a,b", "-1,0", "0,99999", "²,1"]
)
def test_devices_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidUsage, match="write source,destination such as 0,1, or lists"):
        parse_devices(text)


def test_devices_go_to_one_pair_or_to_ranks() -> None:
    assert options_of("--devices", "0:1").devices == (0, 1)
    assert options_of("--devices", "0,1", "--tp", "1:1").rank_devices == ((0,), (1,))
    with pytest.raises(InvalidUsage, match="several GPUs of a side; that takes --tp or --layouts"):
        options_of("--devices", "0,1:2")
