"""KV chunks of every codec as the kernels dequantise them: the numbers of the codec itself, rounded once."""

import pytest
import torch

from realkernels.caches.paged import PagedCache
from realkernels.codecs import Arrangement, arrangements, codec_named, codec_names
from realkernels.kernels.dequantise import dequantiser, missing, power_of_two_below
from realkernels.shape import AttentionShape
from realkernels.timed.attend_decode import attended

CPU = torch.device("cpu")
SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=64)
DEQUANTISED = [name for name in codec_names() if not missing(codec_named(name))]
KEPT = [(name, arrangement) for name in DEQUANTISED for arrangement in arrangements(name)]
ROOM = 512


def pool_of(name: str, arrangement: Arrangement | None = None, tokens: int = 700) -> PagedCache:
    return PagedCache.fill(codec_named(name, arrangement=arrangement), SHAPE, sequences=2, tokens=tokens, device=CPU)


def rows(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.full((ROOM, SHAPE.kv_heads, SHAPE.head_dim), 7.0, dtype=dtype)
    return keys, keys.clone()


@pytest.mark.parametrize(("name", "arrangement"), KEPT)
def test_a_kv_chunk_is_what_the_codec_dequantises(name: str, arrangement: Arrangement) -> None:
    """bf16 is left to the device: the interpreter cuts it off instead of rounding."""
    pool = pool_of(name, arrangement)
    dequantise = dequantiser(pool.codec, pool.planes)
    for dtype, first, last in ((torch.float16, 0, 300), (torch.float32, 512, 699)):
        keys, values = rows(dtype)
        dequantise(pool.table[1], keys, values, first=first, last=last)
        truth = pool.codec.dequantise(pool.planes, pool.slots(1, first, last))
        for found, read in zip((keys, values), truth, strict=True):
            assert torch.equal(found[: last - first], read.to(dtype))
            assert bool((found[last - first :] == 7.0).all())


def test_kvarn_tiles_in_the_sidecar_are_read_there() -> None:
    pool = pool_of("kvarn_k4v2_g128")
    tiles = pool.slots(0, 0, 700)[::128] // 128
    assert [bool(side >= 0) for side in pool.planes.sidecar["side_of_tile"][tiles]] == [True, *[False] * 4, True]
    pool.planes.sidecar["side_keys"].fill_(3.0)
    keys, values = rows()
    dequantiser(pool.codec, pool.planes)(pool.table[0], keys, values, first=0, last=256)
    assert bool((keys[:128] == 3.0).all())
    assert not bool((keys[128:256] == 3.0).any())


@pytest.mark.parametrize("name", ["int8_per_token_head", "q4_0", "exl3_k4v8", "kvarn_k4v2_g64", "turboquant_4bit_nc"])
def test_a_lost_token_stays_lost_and_no_other(name: str) -> None:
    pool = pool_of(name, tokens=256)
    keys = torch.randn(256, SHAPE.kv_heads, SHAPE.head_dim)
    keys[130, 1, 5] = float("nan")
    planes = pool.codec.allocate(1, 256, SHAPE.kv_heads, SHAPE.head_dim, CPU)
    pool.codec.append(planes, torch.arange(256), keys, torch.randn_like(keys))
    found = rows()
    dequantiser(pool.codec, planes)(torch.zeros(1, dtype=torch.int32), *found, first=0, last=256)
    for made, read in zip(found, pool.codec.dequantise(planes, torch.arange(256)), strict=True):
        assert torch.equal(made[:256].isnan(), read.isnan())
    assert bool(found[0][130, 1].isnan().any())
    assert not bool(found[0][129].isnan().any())


def test_every_format_that_decode_reads_can_be_dequantised() -> None:
    assert [name for name in attended() if missing(codec_named(name))] == []
    other = codec_named("exl3_k2v2")
    with pytest.raises(ValueError, match="no kernel dequantises exl3_k2v2"):
        dequantiser(other, other.allocate(1, 16, 1, 32, CPU))


@pytest.mark.parametrize("name", ["bf16", "q8_0", "kvarn_k4v2_g128"])
def test_what_does_not_fit_is_refused(name: str) -> None:
    pool = pool_of(name)
    dequantise, table = dequantiser(pool.codec, pool.planes), pool.table[0]
    keys, values = rows()
    pages = table.numel()
    for given, first, last, words in (
        ((table, keys, values), 0, ROOM + 1, "fit neither 512 rows"),
        ((table, keys, values), 0, 0, "fit neither"),
        ((table, keys, values), 64, 128, "not at 64"),
        ((table, keys, values), 256 * pages, 256 * pages + 1, f"nor {pages} pages"),
        ((table, keys[:, :, :32], values[:, :, :32]), 0, 1, "no rows of"),
        ((table, keys, values.half()), 0, 1, "no rows of"),
        ((table, keys[::2], values[::2]), 0, 1, "one behind the other"),
        ((table.long(), keys, values), 0, 1, "int32"),
    ):
        with pytest.raises(ValueError, match=words):
            dequantise(*given, first=first, last=last)
    assert bool((keys == 7.0).all())


def test_programs_never_leave_a_page() -> None:
    assert [power_of_two_below(number, 32) for number in (1, 16, 48, 256, 800)] == [1, 16, 16, 32, 32]
