"""Decode attention over KVarN's tiles and its sidecar against float64 over what the format reads back."""

from dataclasses import replace

import pytest
import torch

from realkernels.attend.decode_kvarn import plan_words
from tests.realkernels.attend.coded import CPU, Coded, a_plan
from tests.realkernels.attend.worlds import World, relative_error

TOLERANCE = 1e-3
WORLD = World(lengths=(300, 0, 129), query_heads=4, page_tokens=128)


@pytest.mark.parametrize("name", ["kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k4v2_g64"])
def test_sinks_open_tiles_and_quantised_ones(name: str) -> None:
    cache = Coded(WORLD, name)
    assert (cache.views["side_of_tile"] >= 0).sum() >= 3
    assert (cache.views["side_of_tile"] == -1).any()
    out, truth = cache.attend()
    assert relative_error(out, truth) < TOLERANCE
    assert not out[1].any()


@pytest.mark.parametrize("sets", [1, 2])
def test_new_tokens_see_what_is_before_them(sets: int) -> None:
    world = replace(WORLD, q_tokens=4, lengths=(2, 258))
    out, truth = Coded(world, "kvarn_k4v2_g64").attend(a_plan(sets=sets), splits=5)
    assert relative_error(out, truth) < TOLERANCE


def test_the_last_tile_may_be_quantised_and_seen_in_part() -> None:
    cache = Coded(replace(WORLD, lengths=(256,)), "kvarn_k4v2_g64")
    cache.world = replace(cache.world, lengths=(200,), q_tokens=3)  # three more tokens than the sequence has now
    out, truth = cache.attend()
    assert relative_error(out, truth) < TOLERANCE


def test_a_lost_token_is_nan_for_its_head() -> None:
    cache = Coded(replace(WORLD, lengths=(260,)), "kvarn_k4v2_g64")
    tile = int(cache.table[0, 0]) * 2 + 1
    assert cache.views["side_of_tile"][tile] == -1
    cache.views["value_scale"][tile, 1, 5] = torch.nan
    out, _ = cache.attend()
    assert out[0, 0, 2:].isnan().all()
    assert out[0, 0, :2].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    cache = Coded(replace(WORLD, lengths=(5,)), "kvarn_k4v2_g64")
    with pytest.raises(ValueError, match="at least 2"):
        cache.attend(splits=1)
    with pytest.raises(ValueError, match="takes sets of 8"):
        cache.attend(a_plan(rows=16))
    cache.views["key_scale"] = cache.views["key_scale"].contiguous()
    with pytest.raises(ValueError, match="key_scale has strides"):
        cache.attend()


def test_plan() -> None:
    assert plan_words(query_rows=48, head_dim=256, device=CPU).blocks(48) == 6
