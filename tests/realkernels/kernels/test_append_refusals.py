"""What does not fit is refused with its reason before a byte is written."""

import pytest
import torch

from realkernels.codecs import Slots, codec_named
from realkernels.kernels.append import append
from tests.realkernels.codecs.kept import CPU, normal, same_bytes
from tests.realkernels.kernels.twins import twins

KEYS, VALUES = normal(2, 2, 64)
WIDE = torch.zeros(2, 2, 64, 2)[..., 0]


@pytest.mark.parametrize("name", ["bf16", "int4_per_token_head", "q4_0", "exl3_k4v4", "turboquant_4bit_nc"])
@pytest.mark.parametrize(
    ("slots", "keys", "values", "words"),
    [
        ([0, 48], KEYS, VALUES, "slot 48 does not lie in 3 pages of 16 tokens"),
        ([-1, 4], KEYS, VALUES, "slot -1 does not lie"),
        ([4, 4], KEYS, VALUES, "a slot is written twice"),
        ([4], KEYS, VALUES, "keys are .2, 2, 64., 1 slots take .1, 2, 64."),
        ([], KEYS[:0], VALUES[:0], "at least one slot"),
        ([4, 5], KEYS, VALUES[:, :1], "values are .2, 1, 64."),
        ([4, 5], KEYS.double(), VALUES, "keys are torch.float64"),
        ([4, 5], KEYS, VALUES.int(), "values are torch.int32: give floating-point rows"),
        ([4, 5], KEYS, WIDE, "elements of a row of values must be neighbours, they are 2 apart"),
        (torch.tensor([4.0, 5.0]), KEYS, VALUES, "give integers"),
    ],
)
def test_rows_and_slots(name: str, slots: Slots, keys: torch.Tensor, values: torch.Tensor, words: str) -> None:
    fmt = codec_named(name)
    before, after = twins(fmt, dims=64)
    with pytest.raises(ValueError, match=words):
        append(fmt, after, slots, keys, values)
    assert same_bytes(before, after)


@pytest.mark.parametrize(
    ("slots", "words"), [([3], "tile 0 is quantised"), ([70, 130, 200], "tile 3 needs a side slot, all 2 hold")]
)
def test_places_that_a_kvarn_cache_does_not_have(slots: list[int], words: str) -> None:
    fmt = codec_named("kvarn_k4v2_g64")
    pair = [fmt.allocate(4, 64, 2, 16, CPU, side_tiles=2, sinks=()) for _ in range(2)]
    for planes in pair:
        fmt.append(planes, range(64), *normal(64, 2, 16))
    with pytest.raises(ValueError, match=words):
        append(fmt, pair[1], slots, *normal(len(slots), 2, 16))
    assert same_bytes(*pair)
