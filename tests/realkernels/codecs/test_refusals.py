"""What does not fit is refused on the host, by name and number, before anything is written."""

from collections.abc import Callable
from functools import partial
from math import inf, nan

import pytest
import torch

from realkernels.codecs import arrangements, codec_named, codec_names
from realkernels.codecs.turboquant import unit_centroids
from realkernels.kernels.append import append
from tests.realkernels.codecs.kept import ALL, CPU, normal, planes_for, same_bytes

TILED, FP8 = codec_named("kvarn_k4v2_g128"), codec_named("fp8").allocate(1, 4, 1, 8, CPU)


def test_all_formats_have_names() -> None:
    names = codec_names()
    assert len(names) == 3 + 1 + 3 + 3 + 4 + 4 + 49
    assert names == sorted(names)
    assert arrangements("int8_per_token_head") == ("inline", "aligned")
    assert codec_named("int8_per_token_head").arrangement == "inline"
    assert arrangements("bf16") == ("aligned",)
    assert codec_named("exl3_k4v2") == codec_named("exl3_k4v2", arrangement="aligned")
    with pytest.raises(ValueError, match=r"no format 'int5'; there are bf16, fp16, .* and exl3_k2v2 to exl3_k8v8"):
        codec_named("int5")
    with pytest.raises(ValueError, match="no format 'int5'"):
        arrangements("int5")
    with pytest.raises(ValueError, match="bf16 is kept aligned, not inline"):
        codec_named("bf16", arrangement="inline")


@pytest.mark.parametrize(
    ("name", "arrangement", "dims", "words"),
    [
        ("int8_per_token_head", "inline", 30, "multiples of 4, not 30"),
        ("int8_per_token_head", "aligned", 24, "multiples of 16 B: those of key_data have 24 B at head size 24"),
        ("int4_per_token_head", "inline", 96, "power of two from 8, not 96"),
        ("int4_per_token_head", "inline", 4, "power of two from 8, not 4"),
        ("int4_per_token_head", "aligned", 16, "those of key_data have 8 B at head size 16; take inline"),
        ("kvarn_k4v2_g128", "aligned", 96, "power of two from 8, not 96"),
        ("turboquant_3bit_nc", "inline", 48, "power of two from 16, not 48"),
        ("turboquant_k8v4", "inline", 24, "multiples of 16, not 24"),
        ("turboquant_3bit_nc", "aligned", 64, "those of key_data have 24 B at head size 64"),
        ("exl3_k2v2", "aligned", 48, "multiples of 32, not 48"),
        ("q8_0", "inline", 80, "multiples of 32, not 80"),
        ("q4_0", "aligned", 16, "multiples of 32, not 16"),
        ("bf16", "aligned", 0, "not 0|head_dim is 0"),
    ],
)
def test_heads_that_do_not_fit(name: str, arrangement: str, dims: int, words: str) -> None:
    fmt = codec_named(name, arrangement=arrangement)
    with pytest.raises(ValueError, match=words):
        fmt.allocate(1, 128, 1, dims, CPU)
    with pytest.raises(ValueError, match=words):
        fmt.token_bytes(1, dims)


@pytest.mark.parametrize(("name", "arrangement"), ALL)
@pytest.mark.parametrize("size", ["pages", "page_tokens", "kv_heads"])
def test_sizes_below_one(name: str, arrangement: str, size: str) -> None:
    sizes = {"pages": 1, "page_tokens": 128, "kv_heads": 1, "head_dim": 128} | {size: 0}
    with pytest.raises(ValueError, match=f"{size} is 0, which is below 1"):
        codec_named(name, arrangement=arrangement).allocate(**sizes, device=CPU)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((lambda scale=scale: codec_named("fp8").set_scales(FP8, key=1.0, value=scale), "value_scale is")
          for scale in (0.0, -1.0, nan, inf)),
        (lambda: TILED.allocate(1, 192, 1, 64, CPU), "g128 needs pages of whole tiles of 128 tokens, not of 192"),
        (lambda: TILED.allocate(1, 128, 1, 64, CPU, sinks=(1,)), "tile 1 is none of 1"),
        (lambda: TILED.allocate(1, 128, 1, 64, CPU, side_tiles=0), "side_tiles is 0"),
        (lambda: codec_named("turboquant_k8v4").centroids(128, CPU), "turboquant_k8v4 keeps keys as e4m3"),
        (lambda: unit_centroids(0), "1 to 8"),
    ],
)  # fmt: skip
def test_options_of_some_formats(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(("name", "arrangement"), ALL)
def test_slots_and_rows_that_do_not_fit_leave_everything_as_it_is(name: str, arrangement: str) -> None:
    """Whether torch or the kernels append; the kernels take no doubles and no rows with gaps."""
    fmt = codec_named(name, arrangement=arrangement)
    planes, untouched = (planes_for(fmt, tokens=32, heads=2, dims=128) for _ in range(2))
    keys, values = normal(3, 2, 128)
    end, gaps = planes.slots, torch.zeros(3, 2, 128, 2)[..., 0]
    kernels = partial(append, fmt)
    for writes, slots, rows, words in (
        *(
            ((fmt.append, kernels), *given)
            for given in (
                ([], (keys[:0], values[:0]), "at least one slot"),
                ([0, 1, end], (keys, values), f"slot {end} does not lie in"),
                ([0, -1, 2], (keys, values), "slot -1 does not lie in"),
                ([0, 1, 1], (keys, values), "a slot is written twice"),
                ([0, 1], (keys, values), "keys are .3, 2, 128., 2 slots take .2, 2, 128."),
                (torch.tensor([[0, 1, 2]]), (keys, values), "one axis"),
                (torch.tensor([0.0, 1.0, 2.0]), (keys, values), "give integers"),
                ([0, 1, 2], (keys, values[:, :1]), "values are .3, 1, 128."),
                ([0, 1, 2], (keys[..., :64], values), "keys are"),
                ([0, 1, 2], (keys, values.int()), "values are torch.int32: give floating-point rows"),
                ([0, 1, 2], (keys.to("meta"), values), "keys lie on meta, the planes on cpu"),
            )
        ),
        ((kernels,), [0, 1, 2], (keys.double(), values), "keys are torch.float64"),
        ((kernels,), [0, 1, 2], (keys, gaps), "elements of a row of values must be neighbours, they are 2 apart"),
    ):
        for write in writes:
            with pytest.raises(ValueError, match=words):
                write(planes, slots, *rows)
    assert same_bytes(planes, untouched)
    for slots, words in (([], "at least one slot"), ([end], "does not lie in"), ([-1], "does not lie in")):
        for read in (fmt.dequantise, fmt.restore):
            with pytest.raises(ValueError, match=words):
                read(planes, slots)
