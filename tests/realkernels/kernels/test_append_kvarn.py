"""KVarN's tokens go where torch puts them, tiles are quantised when their last token comes, nothing else changes."""

from collections.abc import Iterable

import pytest
import torch

from realkernels.codecs import KVarN, Planes, codec_named
from realkernels.kernels.append import append
from tests.realkernels.codecs.kept import CPU, KVARN, outliers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MOST_MOVED = 0.02
"""Share of the bytes of records that may differ: logarithms and sums are a last bit apart."""

APART = 0.02
"""Relative difference of what is read that comes with it."""


def pair_of(name: str, *, dims: int = 16, **more: object) -> tuple[KVarN, list[Planes]]:
    """Eight tiles in two or four pages."""
    fmt = codec_named(name)
    assert isinstance(fmt, KVarN)
    return fmt, [fmt.allocate(4, 2 * fmt.tile_tokens, 2, dims, CPU, **more) for _ in range(2)]


def appended(
    fmt: KVarN, pair: list[Planes], slots: torch.Tensor, rows: Iterable[torch.Tensor], *, checked: bool = False
) -> None:
    """By torch to the first planes and by the kernels to the second."""
    keys, values = rows
    fmt.append(pair[0], slots, keys, values, checked=checked)
    append(fmt, pair[1], slots, keys, values, checked=checked)


def in_a_row(*sizes: int) -> list[torch.Tensor]:
    return list(torch.arange(sum(sizes)).split(sizes))


def check(fmt: KVarN, one: Planes, other: Planes) -> None:
    """Sidecars equal in every byte, records but for a few codes, and what is read nearly."""
    for name, part in one.sidecar.items():
        assert torch.equal(part.view(torch.uint8), other.sidecar[name].view(torch.uint8)), name
    assert float((one.tensors["tiles"] != other.tensors["tiles"]).float().mean()) < MOST_MOVED
    slots = [
        tile * fmt.tile_tokens + at
        for tile, state in enumerate(one.sidecar["side_of_tile"].tolist()) if state == -1
        for at in range(fmt.tile_tokens)
    ]  # fmt: skip
    if slots:
        for first, second in zip(fmt.restore(one, slots), fmt.restore(other, slots), strict=True):
            assert torch.equal(first.isnan(), second.isnan())
            apart = (first - second).nan_to_num(0.0)
            assert float(apart.norm()) <= APART * float(first.nan_to_num(0.0).norm())


@pytest.mark.parametrize(
    ("name", "runs", "options", "sides"),
    [
        *((name, in_a_row(1), {"sinks": ()}, []) for name in KVARN),
        *((name, in_a_row(3, 126, 1, 140), {"sinks": (1,), "side_tiles": 4}, []) for name in KVARN),
        ("kvarn_k4v2_g64", in_a_row(62, 1, 1, 1, 1, 40), {"sinks": ()}, []),
        ("kvarn_k4v2_g64", in_a_row(150), {"sinks": (0, 1), "side_tiles": 4}, []),
        ("kvarn_k4v2_g64", in_a_row(5, 140), {"sinks": (0,), "side_tiles": 4}, []),
        # without a side slot tokens are dropped, as are those of quantised tiles
        ("kvarn_k4v2_g64", [torch.arange(first, first + 4) for first in (0, 64, 128, 64, 100)],
         {"sinks": (), "side_tiles": 2}, [0, 1, -2]),
        ("kvarn_k4v2_g64", [torch.arange(64), torch.arange(5, 9)], {"sinks": ()}, [-1]),
    ],
)  # fmt: skip
def test_tokens_of_one_call_after_the_other(
    name: str, runs: list[torch.Tensor], options: dict[str, object], sides: list[int]
) -> None:
    """Across the ends of tiles, one of which may be a sink."""
    fmt, pair = pair_of(name, **options)
    sizes = [slots.numel() for slots in runs]
    for slots, *rows in zip(runs, *(part.split(sizes) for part in outliers(sum(sizes), 2, 16)), strict=True):
        appended(fmt, pair, slots, rows)
    check(fmt, *pair)
    assert pair[1].sidecar["side_of_tile"].tolist()[: len(sides)] == sides


def appended_together(name: str, parts: list[torch.Tensor], **options: object) -> None:
    """Each part at once leaves what it leaves run by run, in every byte, and the reference's sidecar."""
    fmt, (one, runs) = pair_of(name, **options)
    together = pair_of(name, **options)[1][0]
    for part in parts:
        keys, values = outliers(part.numel(), 2, 16, seed=part.numel())
        fmt.append(one, part, keys, values, checked=False)
        append(fmt, together, part, keys, values, checked=False)
        for first in range(0, part.numel(), fmt.tile_tokens):
            run = slice(first, first + fmt.tile_tokens)
            append(fmt, runs, part[run], keys[run], values[run], checked=False)
    for side, part in one.sidecar.items():
        for other in (together, runs):
            assert torch.equal(part.view(torch.uint8), other.sidecar[side].view(torch.uint8)), side
    assert torch.equal(together.tensors["tiles"], runs.tensors["tiles"])
    assert runs.tensors["tiles"].any()


@pytest.mark.parametrize("name", KVARN)
def test_tiles_of_one_append_are_quantised_together(name: str) -> None:
    appended_together(name, [torch.arange(700 if "g128" in name else 350)], sinks=(1,), side_tiles=4)


@pytest.mark.parametrize("size", [127, 128, 129, 300, 440])
def test_an_append_of_several_tiles_after_a_partly_filled_one(size: int) -> None:
    """Off a tile, past a sink, with two side slots beside its own: tiles take turns in them within one append."""
    parts = torch.arange(37 + size + 1).split([37, size, 1])
    appended_together("kvarn_k4v2_g64", list(parts), sinks=(2,), side_tiles=3)


@pytest.mark.parametrize("side_tiles", [2, 8])
def test_an_append_of_several_tiles_in_any_order(side_tiles: int) -> None:
    """Tokens that find no side slot in their run are dropped, those of a later run may find one."""
    shuffled = torch.randperm(448, generator=torch.Generator().manual_seed(4)) + 64
    parts = [torch.arange(20), torch.cat([torch.arange(20, 64), shuffled])]
    appended_together("kvarn_k4v2_g64", parts, sinks=(3,), side_tiles=side_tiles)


def test_a_head_of_256_and_bf16_rows() -> None:
    fmt, pair = pair_of("kvarn_k4v2_g64", dims=256, sinks=())  # the open tile gets the slot of the full one
    appended(fmt, pair, torch.arange(70), (part.bfloat16() for part in outliers(70, 2, 256)), checked=True)
    check(fmt, *pair)
    assert pair[1].sidecar["side_of_tile"].tolist()[:2] == [-1, 0]


@pytest.mark.parametrize("sizes", [[64], [30, 34]])
def test_sequences_take_turns_in_any_order(sizes: list[int]) -> None:
    """Eight tokens each of many tiles, shuffled, then the rest of some; an open tile may be written again."""
    fmt, pair = pair_of("kvarn_k4v2_g64", side_tiles=8, sinks=(3,))
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    some = torch.cat([torch.arange(first, first + 8) for first in range(0, 512, 64)])[shuffled]
    rest = torch.cat([torch.arange(64, 128), torch.arange(200, 256), torch.arange(450, 512)])
    for slots in (*some.split(sizes), *rest.split(64)):
        appended(fmt, pair, slots, outliers(slots.numel(), 2, 16, seed=int(slots[0])))
    check(fmt, *pair)
    assert sorted(pair[1].sidecar["side_of_tile"].tolist())[:2] == [-1, -1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_lost_token_takes_nothing_with_it(value: float) -> None:
    fmt, pair = pair_of("kvarn_k4v2_g64", sinks=())
    keys, values = outliers(64, 2, 16)
    keys[5, 1, 3], values[9, 0, 2] = value, value
    appended(fmt, pair, torch.arange(64), (keys, values), checked=True)
    check(fmt, *pair)
    back = fmt.restore(pair[1], range(64))
    assert back[0].isnan().any(dim=-1).nonzero().tolist() == [[5, 1]]
    assert back[1].isnan().any(dim=-1).nonzero().tolist() == [[9, 0]]


def test_a_tile_of_zeros() -> None:
    fmt, pair = pair_of("kvarn_k4v2_g64", sinks=())
    appended(fmt, pair, torch.arange(64), torch.zeros(2, 64, 2, 16), checked=True)
    check(fmt, *pair)
    assert not any(part.any() for part in fmt.restore(pair[1], range(64)))
