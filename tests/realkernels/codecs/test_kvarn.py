"""Open tiles, sinks, side slots: which tokens are float16, which are quantised, and when."""

from copy import deepcopy

import numpy as np
import pytest
import torch

from realkernels.codecs import KVarN, Planes, codec_named
from realkernels.codecs.kvarn import EMPTY, QUANTISED, column_logs, quantise_tile
from tests.realkernels.codecs.kept import CPU, normal, same_bytes, stored

FORMAT = codec_named("kvarn_k4v2_g64")
TILE, DIMS = 64, 16


def planes_of(tiles: int, **more) -> Planes:
    assert isinstance(FORMAT, KVarN)
    return FORMAT.allocate(tiles, TILE, 2, DIMS, CPU, **more)


def add(planes: Planes, slots: range | list[int], *, checked: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = normal(len(slots), 2, DIMS, seed=slots[0] + 1)
    FORMAT.append(planes, slots, keys, values, checked=checked)
    return keys, values


def where(planes: Planes) -> list[str]:
    words = {QUANTISED: "quantised", EMPTY: "empty"}
    return [words.get(side, "beside") for side in planes.sidecar["side_of_tile"].tolist()]


def kept_as_halves(planes: Planes, slots: range | list[int], keys: torch.Tensor, values: torch.Tensor) -> bool:
    truth, held = stored(FORMAT.name, keys, values), FORMAT.dequantise(planes, slots)
    return all(np.allclose(got, x, rtol=2.0**-10, atol=1e-5) for got, x in zip(held, truth, strict=True))


def test_the_first_tile_and_the_open_one_stay_in_halves() -> None:
    planes = planes_of(4)
    keys, values = add(planes, range(3 * TILE + 7))
    assert where(planes) == ["beside", "quantised", "quantised", "beside"]
    for first, stop in ((0, TILE), (3 * TILE, 3 * TILE + 7)):
        assert kept_as_halves(planes, range(first, stop), keys[first:stop], values[first:stop])
    assert not kept_as_halves(planes, range(TILE, 2 * TILE), keys[TILE : 2 * TILE], values[TILE : 2 * TILE])
    back = FORMAT.restore(planes, range(3 * TILE + 7))
    assert float((back[0] - keys).norm() / keys.norm()) < 0.1


def test_a_tile_is_quantised_with_its_last_token() -> None:
    planes = planes_of(2, sinks=())
    add(planes, range(TILE - 1))
    assert where(planes) == ["beside", "empty"]
    assert not bool(planes.tensors["tiles"].any())
    add(planes, [TILE - 1])
    assert where(planes) == ["quantised", "empty"]
    assert not bool(planes.sidecar["present"].any())
    assert planes.sidecar["tile_of_side"].tolist() == [-1, -1]


def test_a_sequence_that_begins_elsewhere_pins_its_own_first_tile() -> None:
    planes = planes_of(3, sinks=(2,))
    add(planes, [*range(2 * TILE, 3 * TILE), *range(TILE)])
    assert where(planes) == ["quantised", "empty", "beside"]
    FORMAT.pin(planes, [1])
    add(planes, range(TILE, 2 * TILE))
    assert where(planes) == ["quantised", "beside", "beside"]
    with pytest.raises(ValueError, match="tile 0 is quantised: pin it before its last token is written"):
        FORMAT.pin(planes, [0])


@pytest.mark.parametrize("checked", [True, False])
def test_many_sequences_fill_their_tiles_side_by_side(*, checked: bool) -> None:
    """One token of each of five at a time, as a batch decodes."""
    planes = planes_of(5, sinks=(), side_tiles=5)
    alone = planes_of(5, sinks=(), side_tiles=5)
    keys, values = normal(5 * TILE, 2, DIMS)
    for offset in range(TILE):
        slots = [tile * TILE + offset for tile in (3, 0, 4, 1, 2)]
        FORMAT.append(planes, slots, keys[slots], values[slots], checked=checked)
    FORMAT.append(alone, range(5 * TILE), keys, values)
    assert where(planes) == ["quantised"] * 5
    assert torch.equal(planes.tensors["tiles"], alone.tensors["tiles"])


def test_one_side_slot_is_enough_for_a_sequence_without_a_sink() -> None:
    planes = planes_of(4, sinks=(), side_tiles=1)
    for first in range(0, 4 * TILE, TILE):
        add(planes, range(first, first + TILE))
    assert where(planes) == ["quantised"] * 4


def test_more_open_tiles_than_side_slots_are_refused_and_nothing_is_written() -> None:
    planes = planes_of(4, side_tiles=2)
    add(planes, range(3))
    before = deepcopy(planes)
    with pytest.raises(ValueError, match="tile 3 needs a side slot, all 2 hold open tiles or sinks"):
        add(planes, [*range(TILE, TILE + 5), 3 * TILE])
    assert same_bytes(planes, before)
    add(planes, range(TILE, 2 * TILE))
    add(planes, [3 * TILE])
    assert where(planes) == ["beside", "quantised", "empty", "beside"]


def test_without_checks_tokens_without_a_side_slot_are_dropped_and_others_are_not() -> None:
    planes = planes_of(4, sinks=(), side_tiles=2)
    slots = [0, TILE, 2 * TILE, 1, 2 * TILE + 1]
    keys, values = add(planes, slots, checked=False)
    assert where(planes) == ["beside", "beside", "empty", "empty"]
    there = [0, 1, 3]
    assert kept_as_halves(planes, [slots[at] for at in there], keys[there], values[there])
    assert int(planes.sidecar["present"].sum()) == 3


def test_slots_of_a_quantised_tile_are_refused_until_it_is_released() -> None:
    planes = planes_of(2, sinks=())
    add(planes, range(TILE))
    record = planes.tensors["tiles"].clone()
    with pytest.raises(ValueError, match="tile 0 is quantised: release it"):
        add(planes, [5])
    add(planes, [5], checked=False)
    assert torch.equal(planes.tensors["tiles"], record)
    FORMAT.release(planes, [0])
    assert where(planes) == ["empty", "empty"]
    keys, values = add(planes, range(10))
    assert kept_as_halves(planes, range(10), keys, values)


def test_a_tile_completed_and_written_in_one_append_is_refused() -> None:
    planes = planes_of(2, sinks=())
    add(planes, [1])
    with pytest.raises(ValueError, match="written twice"):
        add(planes, [*range(TILE), 0])
    add(planes, [0, *range(2, TILE - 1)])
    keys, values = add(planes, [*range(TILE, 2 * TILE - 1), TILE - 1])
    assert where(planes) == ["quantised", "beside"]
    assert kept_as_halves(planes, range(TILE, 2 * TILE - 1), keys[:-1], values[:-1])


def test_released_tiles_give_their_side_slots_back() -> None:
    planes = planes_of(4, side_tiles=2, sinks=(0,))
    add(planes, range(TILE + 3))
    assert where(planes) == ["beside", "beside", "empty", "empty"]
    FORMAT.release(planes, [0, 1])
    assert planes.sidecar["tile_of_side"].tolist() == [-1, -1]
    add(planes, range(2 * TILE, 4 * TILE))
    assert where(planes) == ["empty", "empty", "quantised", "quantised"]
    FORMAT.release(planes, [])
    with pytest.raises(ValueError, match="tile 4 is none of 4"):
        FORMAT.release(planes, [4])


def test_a_token_of_an_open_tile_may_be_written_again() -> None:
    planes = planes_of(1, sinks=())
    add(planes, range(TILE - 1))
    keys, values = normal(1, 2, DIMS, seed=99)
    FORMAT.append(planes, [3], keys, values)
    assert where(planes) == ["beside"]
    assert kept_as_halves(planes, [3], keys, values)


def test_bytes_of_a_side_slot_and_of_a_small_head() -> None:
    """2 x 2 B an element; a tile of one head of 16 has 600 + 608 B, rounded up to 19 B a token."""
    planes = planes_of(4, side_tiles=3)
    pool = sum(planes.sidecar[name].nbytes for name in ("side_keys", "side_values"))
    assert pool == 3 * TILE * 2 * DIMS * 2 * 2
    assert sum(part.nbytes for part in planes.sidecar.values()) == pool + 4 * 4 + 3 * 4 + 3 * TILE + 4
    large = codec_named("kvarn_k4v2_g128")
    assert large.token_bytes(1, 16) * 128 == large.tile_bytes(16) + 32
    assert large.allocate(2, 256, 1, 16, CPU).nbytes == 512 * large.token_bytes(1, 16)


def test_the_columns_scales_even_a_tile_out() -> None:
    """Loud columns come back as scales in their proportion, up to the factor that the rows take."""
    x = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(2)).double()
    loud = torch.ones(32, dtype=torch.float64)
    loud[5], loud[9] = 30.0, 8.0
    logs = column_logs((x * loud).float())[0, 0].double()
    after = (x * loud / logs.exp()).std(dim=-2)
    assert float(after.max() / after.min()) < 1.2
    assert float(logs[5].exp() / logs[0].exp()) == pytest.approx(30, rel=0.4)


def test_the_state_with_the_least_unevenness_is_kept() -> None:
    """An even tile is left alone although each iteration would move its scales."""
    x = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * 7
    assert column_logs(x).tolist() == [[0.0, 0.0]]


def test_a_constant_row_has_no_steps_and_comes_back() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(6))
    x[2] = 0.0
    codes, scale, zero, column = quantise_tile(x, 4)
    back = (codes * scale[:, None].float() + zero[:, None].float()) * column.float()
    assert (float(scale[2]), float(zero[2])) == (0.0, 0.0)
    assert back[2].tolist() == [0.0] * 8
    assert float((back - x).abs().max()) < 0.3


def test_tiles_written_together_are_those_appended_one_after_the_other() -> None:
    one, other = planes_of(6, sinks=(1, 5)), planes_of(6, sinks=(1, 5))
    tiles, (keys, values) = [4, 0, 3], normal(3 * TILE, 2, DIMS)
    FORMAT.append(one, [tile * TILE + at for tile in tiles for at in range(TILE)], keys, values)
    rows = [part.unflatten(0, (3, TILE)) for part in (keys, values)]
    FORMAT.write_tiles(other, tiles, *rows)
    assert torch.equal(one.tensors["tiles"], other.tensors["tiles"])
    assert torch.equal(one.sidecar["side_of_tile"], other.sidecar["side_of_tile"])
    FORMAT.append(one, range(TILE, 2 * TILE), keys[:TILE], values[:TILE])
    FORMAT.write_aside(other, [1], *(part[:1] for part in rows))
    FORMAT.append(one, range(2 * TILE, 2 * TILE + 9), keys[:9], values[:9])
    FORMAT.write_aside(other, [2], *(part[:1, :9] for part in rows))
    assert where(other) == where(one) == ["quantised", "beside", "beside", "quantised", "quantised", "empty"]
    for first, second in zip(
        FORMAT.dequantise(one, range(5 * TILE)), FORMAT.dequantise(other, range(5 * TILE)), strict=True
    ):
        assert torch.equal(first, second)
    assert int(other.sidecar["present"].sum()) == TILE + 9


def test_tiles_that_cannot_be_written_together_are_refused_before_anything_is_written() -> None:
    planes = planes_of(4, sinks=(1,), side_tiles=2)
    add(planes, range(3))
    before = deepcopy(planes)
    whole = [part.unflatten(0, (2, TILE)) for part in normal(2 * TILE, 2, DIMS)]
    some = [part[:, :5] for part in whole]
    for write, tiles, rows, message in (
        (FORMAT.write_tiles, [0, 2], whole, "tile 0 holds tokens"),
        (FORMAT.write_tiles, [1, 2], whole, "tile 1 is a sink"),
        (FORMAT.write_tiles, [2, 4], whole, "tile 4 is none of 4"),
        (FORMAT.write_tiles, [2, 2], whole, "give each once"),
        (FORMAT.write_tiles, [2, 3], some, "128 slots take"),
        (FORMAT.write_tiles, [2, 3, 1], whole, "192 slots take"),
        (FORMAT.write_aside, [2, 3], some, "2 tiles need a side slot, 1 are free"),
        (FORMAT.write_aside, [3], whole, "only as sinks"),
        (FORMAT.write_aside, [3, 0], some, "tile 0 holds tokens"),
        (FORMAT.write_aside, [], some, "at least one"),
        (FORMAT.write_aside, [3], [part[:, :0] for part in whole], "0 tokens of a tile of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            write(planes, tiles, *rows)
    assert same_bytes(planes, before)


def test_tiles_aside_take_their_rows_in_turn() -> None:
    planes = planes_of(5, sinks=(), side_tiles=5)
    rows = [part.unflatten(0, (2, 7)) for part in normal(14, 2, DIMS)]
    FORMAT.write_aside(planes, [3, 0, 4, 1], *rows)
    for number, tile in enumerate((3, 0, 4, 1)):
        first = number % 2 * 7
        keys, values = (part.flatten(0, 1)[first : first + 7] for part in rows)
        assert kept_as_halves(planes, range(tile * TILE, tile * TILE + 7), keys, values)
