"""Tokens come one at a time or together, into pages in any order, and leave everything else as it is."""

import pytest
import torch

from realkernels.codecs import Planes, codec_named
from tests.realkernels.codecs.kept import ALL, CPU, KVARN, ROWS, normal, outliers, planes_for, same_bytes, twins


def filled(name: str, arrangement: str, runs: list[list[int]], *, dims: int, checked: bool = True, **more) -> Planes:
    """Planes to which the rows of an outlier-ridden sequence were appended run by run."""
    fmt = codec_named(name, arrangement=arrangement)
    tokens = sum(map(len, runs))
    tile = fmt.tile_tokens
    planes = fmt.allocate(4, 128 if tile == 1 else 2 * tile, 2, dims, CPU, **more)
    parts = (rows.split([len(run) for run in runs]) for rows in outliers(tokens, 2, dims))
    for run, keys, values in zip(runs, *parts, strict=True):
        fmt.append(planes, run, keys, values, checked=checked)
    return planes


def cut_up(slots: list[int], sizes: list[int]) -> list[list[int]]:
    return [part.tolist() for part in torch.tensor(slots).split(sizes)]


@pytest.mark.parametrize(("name", "arrangement"), ROWS)
@pytest.mark.parametrize("sizes", [[1] * 37, [36, 1], [2, 3, 5, 11, 16]])
def test_one_at_a_time_or_all_at_once_is_the_same_bit_by_bit(name: str, arrangement: str, sizes: list[int]) -> None:
    slots = [*range(380, 384), *range(100, 133)]
    together = filled(name, arrangement, [slots], dims=128)
    assert same_bytes(together, filled(name, arrangement, cut_up(slots, sizes), dims=128))
    assert same_bytes(together, filled(name, arrangement, [slots], dims=128, checked=False))


@pytest.mark.parametrize("name", KVARN)
@pytest.mark.parametrize(
    "sizes", [[1] * 300, [299, 1], [5, 150, 145], [64, 128, 108], [300], [126, 1, 1, 1, 1, 61, 1, 1, 1, 106]]
)
def test_tiles_are_the_same_however_their_tokens_come(name: str, sizes: list[int]) -> None:
    """Without checks, as a graph is captured, nothing is read back and every touched tile is tried."""
    slots, fmt = list(range(300)), codec_named(name)
    together, apart = (filled(name, "aligned", cut_up(slots, cut), dims=16) for cut in ([300], sizes))
    assert torch.equal(together.tensors["tiles"], apart.tensors["tiles"])
    open_tiles = [planes.sidecar["side_of_tile"].clamp(max=0) for planes in (together, apart)]
    assert torch.equal(*open_tiles), "which side slot a tile has depends on what was free"
    for one, other in zip(fmt.dequantise(together, slots), fmt.dequantise(apart, slots), strict=True):
        assert torch.equal(one, other)
    assert same_bytes(apart, filled(name, "aligned", cut_up(slots, sizes), dims=16, checked=False))


@pytest.mark.parametrize(("name", "arrangement"), ALL)
def test_pages_in_any_order(name: str, arrangement: str) -> None:
    """A sequence whose pages are 2, 0, 3, 1 reads as one whose pages are in order."""
    fmt = codec_named(name, arrangement=arrangement)
    page_tokens = 16 if fmt.tile_tokens == 1 else fmt.tile_tokens
    keys, values = normal(4 * page_tokens - 3, 2, 128)
    back = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        more = {"sinks": (order[0],)} if fmt.tile_tokens > 1 else {}
        planes = fmt.allocate(4, page_tokens, 2, 128, CPU, **more)
        slots = torch.tensor([order[at // page_tokens] * page_tokens + at % page_tokens for at in range(len(keys))])
        fmt.append(planes, slots, keys, values)
        back.append(torch.stack(fmt.restore(planes, slots)))
        assert torch.equal(torch.stack(fmt.restore(planes, slots.flip(0))).flip(1), back[-1])
    assert torch.equal(*back)


@pytest.mark.parametrize(("name", "arrangement"), ROWS)
def test_other_slots_keep_every_byte(name: str, arrangement: str) -> None:
    fmt = codec_named(name, arrangement=arrangement)
    before, planes = twins(fmt, page_tokens=7, heads=3)
    slots = [20, 0, 9, 10]
    fmt.append(planes, slots, *normal(4, 3, 128))
    touched = torch.zeros(3, 7, dtype=torch.bool)
    for slot in slots:
        touched[slot // 7, slot % 7] = True
    for part, view in planes.parts.items():
        rest, old = view.transpose(1, 2)[~touched], before.parts[part].transpose(1, 2)[~touched]
        assert torch.equal(rest.contiguous().view(torch.uint8), old.contiguous().view(torch.uint8))
        assert not torch.equal(view.transpose(1, 2)[touched], before.parts[part].transpose(1, 2)[touched])


@pytest.mark.parametrize(("name", "arrangement"), ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_any_floating_type(name: str, arrangement: str, dtype: torch.dtype) -> None:
    """A half-precision row is kept as its float32 is; rows that hold gradients or strides are no different."""
    fmt = codec_named(name, arrangement=arrangement)
    keys, values = (rows.to(torch.float16).to(dtype) for rows in normal(6, 2, 128))
    strided = torch.stack((keys, values), dim=-1).requires_grad_()
    one, other = (planes_for(fmt, tokens=6, heads=2, dims=128) for _ in range(2))
    fmt.append(one, range(6), keys.float(), values.float())
    fmt.append(other, range(6), strided[..., 0], strided[..., 1])
    assert same_bytes(one, other)
    assert all(not tensor.requires_grad for tensor in (*other.tensors.values(), *other.sidecar.values()))
    back = fmt.restore(one, [5, 0], dtype=dtype)
    assert back[0].dtype == back[1].dtype == dtype
    assert torch.equal(back[0], fmt.restore(one, [5, 0])[0].to(dtype))


@pytest.mark.parametrize(("name", "arrangement"), ALL)
def test_slots_may_be_a_list_a_range_or_a_tensor(name: str, arrangement: str) -> None:
    fmt = codec_named(name, arrangement=arrangement)
    rows, held = normal(3, 1, 128), []
    for slots in ([4, 5, 6], range(4, 7), torch.tensor([4, 5, 6]), torch.tensor([4, 5, 6], dtype=torch.int32)):
        planes = planes_for(fmt, tokens=8, heads=1, dims=128)
        fmt.append(planes, slots, *rows)
        held.append(planes)
    assert all(same_bytes(held[0], other) for other in held[1:])
