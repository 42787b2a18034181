"""Decode attention over every codec's cache against float64 over what the codec reads back."""

from dataclasses import replace

import pytest
import torch

from realkernels.codecs import codec_named
from realkernels.kernels.decode_kvarn import attend_kvarn
from realkernels.kernels.decode_plain import attend_plain
from realkernels.kernels.decode_scaled import attend_scaled
from realkernels.kernels.decode_words import attend_words
from realkernels.kernels.split_kv import TilePlan, Workspace
from realkernels.timed.attend_decode import attended
from realkernels.timed.call import relative_error
from tests.realkernels.kernels.coded import CPU, Coded, World, a_plan

INT8, INT4, TURBO = "int8_per_token_head", "int4_per_token_head", "turboquant_4bit_nc"
INLINE = (INT8, "fp8_per_token_head", INT4, "q4_0", "q5_1", TURBO)
CODECS = [
    *((name, "inline" if name == "q8_0" else "aligned") for name in attended()), *((name, "inline") for name in INLINE)
]  # fmt: skip
LOOPS = {
    attend_plain: [a_plan(rows=16), a_plan(rows=32), a_plan(rows=16, wide=False)],
    attend_scaled: [
        a_plan(rows=16), a_plan(rows=16, sets=3), a_plan(rows=32, sets=2), a_plan(rows=16, across=True),
        a_plan(rows=48, across=True),
    ],
    attend_words: [
        a_plan(num_warps=2), a_plan(sets=3), a_plan(sets=5), a_plan(rows=16, sets=2, num_warps=2), a_plan(rows=24),
        a_plan(rows=32),
    ],
    attend_kvarn: [a_plan(num_warps=2), a_plan(sets=2, num_warps=2)],
}  # fmt: skip
"""Plans by the loop that they belong to, the usual one first."""
PLANS = [
    (name, plan)
    for name in (
        "fp16", "bf16", INT8, "fp8_per_token_head", INT4, "q4_0", "q5_1", "iq4_nl", "exl3_k8v4", TURBO,
        "kvarn_k4v2_g64",
    )
    for plan in LOOPS[codec_named(name).decode_form.loop][:: 1 if name in {"fp16", INT8, INT4, "kvarn_k4v2_g64"} else 2]
    if name != "q5_1" or plan.rows != 16
]  # fmt: skip
OF_LOOPS = [
    ("fp16", a_plan(rows=16)), (INT8, a_plan(rows=16)), (INT8, a_plan(rows=32, across=True)), (INT4, a_plan()),
    (INT4, a_plan(rows=32)),
]  # fmt: skip
"""A codec and a plan for each loop over rows of tokens, and for each of its steps."""


def usual(name: str) -> TilePlan:
    return LOOPS[codec_named(name).decode_form.loop][0]


def tolerance(name: str) -> float:
    """fp16 outputs, p rounded before its product; TurboQuant's polynomial misses centroids by 2e-3 of a deviation."""
    return {"bf16": 8e-3, TURBO: 4e-3}.get(name, 1e-3)


def of(name: str, **sizes: object) -> World:
    """A small world whose pages hold whole tiles of the codec, with queries of its own type."""
    if name.startswith("kvarn"):
        sizes["page_tokens"] = 128
    return World(dtype=torch.bfloat16 if name == "bf16" else torch.float16, **sizes)


@pytest.mark.parametrize(("name", "arrangement"), CODECS)
def test_lengths_off_pages_and_tiles_and_an_empty_sequence(name: str, arrangement: str) -> None:
    lengths = (300, 0, 129) if name.startswith("kvarn") else (70, 0, 1, 31, 64)
    world = of(name, lengths=lengths, head_dim=64, query_heads=4)
    out, truth = Coded(world, name, arrangement).attend(usual(name))
    assert relative_error(out, truth) < tolerance(name)
    assert not out[1].any()


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_new_tokens_see_what_is_before_them(name: str, plan: TilePlan) -> None:
    """Rows that see nothing, sets of rows of which some lie beyond, a thread block for all rows or one of several."""
    lengths = (3, 258) if name.startswith("kvarn") else (3, 0, 37)
    world = of(name, lengths=lengths, q_tokens=7, query_heads=4, kv_heads=1)
    out, truth = Coded(world, name).attend(plan)
    assert relative_error(out, truth) < tolerance(name)
    assert not out[0, :4].any()


@pytest.mark.parametrize(("name", "plan"), OF_LOOPS)
@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ({"query_heads": 12, "kv_heads": 1, "head_dim": 64, "page_tokens": 16}, 32),
        ({"query_heads": 6, "head_dim": 128, "page_tokens": 128}, 64),
    ],
)
def test_pages_larger_and_smaller_than_a_tile(name: str, plan: TilePlan, sizes: dict[str, int], tile: int) -> None:
    cache = Coded(World(lengths=(140,), **sizes), name)
    for splits in (1, 4):  # or more of them than tiles
        out, truth = cache.attend(replace(plan, tile=tile), splits=splits)
        assert relative_error(out, truth) < tolerance(name)


USUAL, OWN = {"lengths": (50, 33)}, {"lengths": (150,), "query_heads": 4, "page_tokens": 128}
HALF = {"lengths": (37,), "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "plan", "sizes", "spread", "amplify", "times"),
    [
        *((name, None, OWN, 0.5, 1.0, 1) for name in ("fp16", "fp8", INT8, INT4, "q4_0")),  # the codec's own plan
        *((name, usual(name), HALF, 0.5, 1.0, 6) for name in (INT8, INT4)),  # the rounding of a bf16 output
        (INT8, a_plan(rows=16), USUAL, 3.0, 1.0, 1), (INT8, a_plan(rows=32, across=True), USUAL, 3.0, 1.0, 1),
        *(("fp8_per_token_head", plan, USUAL, 1.0, amplify, 2)
          for plan in (a_plan(rows=16), a_plan(rows=32, across=True)) for amplify in (2.0**-12, 1e3)),
        (INT4, a_plan(), USUAL, 3.0, 0.02, 2), (INT4, a_plan(rows=32), USUAL, 3.0, 0.02, 2),
        (INT4, a_plan(), USUAL, 0.5, 30.0, 5), ("exl3_k4v4", a_plan(), USUAL, 2.0, 0.05, 2),
    ],
)  # fmt: skip
def test_own_plans_bf16_queries_scales_far_apart_and_small_and_large_queries(
    name: str, plan: TilePlan | None, sizes: dict[str, object], *, spread: float, amplify: float, times: int
) -> None:
    out, truth = Coded(World(**sizes), name, spread=spread).attend(plan, amplify=amplify)
    assert relative_error(out, truth) < times * tolerance(name)


def test_a_large_query_beside_a_small_one() -> None:
    factors = torch.tensor([2.0**8, 2.0**-8])[None, :, None, None]
    world = World(lengths=(70,), q_tokens=2, query_heads=6, kv_heads=1)
    out, truth = Coded(world, INT8).attend(a_plan(rows=16, across=True), amplify=factors)
    assert relative_error(out[:, 0], truth[:, 0]) < 2e-3
    assert relative_error(out[:, 1], truth[:, 1]) < 1e-3


@pytest.mark.parametrize(
    ("name", "plane", "plan"),
    [
        ("fp16", "key_data", a_plan(rows=16)), (TURBO, "key_norm", a_plan()),
        *((name, plane, plan) for name, plan in OF_LOOPS[1:] for plane in ("key_scale", "value_scale")),
    ],
)  # fmt: skip
def test_a_nan_reaches_its_kv_head_of_its_sequence_and_no_query_before_it(
    name: str, plane: str, plan: TilePlan
) -> None:
    world = World(lengths=(40, 21), q_tokens=2, query_heads=4)
    cache = Coded(world, name)
    cache.poison(plane, row=0, token=39, head=1)
    out, truth = cache.attend(plan)
    assert out[0, 1, 2:].isnan().all()
    out[0, 1, 2:] = truth[0, 1, 2:] = 0.0
    assert relative_error(out, truth) < tolerance(name)


def test_a_nan_in_the_only_key_is_no_empty_sequence() -> None:
    cache = Coded(World(lengths=(1,), query_heads=4), "fp16")
    cache.poison("key_data", row=0, token=0, head=0)
    out, _ = cache.attend(usual("fp16"))
    assert out[0, 0, :2].isnan().all()
    assert out[0, 0, 2:].isfinite().all()


def test_a_nan_in_a_group_of_v_stays_there() -> None:
    cache = Coded(World(lengths=(20,), query_heads=4, head_dim=64), "q4_0")
    cache.views["value_scale"][cache.table[0, 0].long(), 0, 7, 1] = torch.nan
    out, _ = cache.attend(a_plan())
    assert out[0, 0, :2, 32:].isnan().all()
    out[0, 0, :2, 32:] = 0.0
    assert out.isfinite().all()


def test_the_largest_codes_are_exact() -> None:
    """Products of codes are exact however large: all codes 15, zero points 0, and one token's V stands out."""
    cache = Coded(World(lengths=(20,), query_heads=2), INT4)
    for view in ("key_data", "value_data"):
        cache.views[view].fill_(0xFF)
    cache.views["key_scale"].copy_((cache.views["key_scale"].view(torch.int32) & ~15).view(torch.float32))
    out, truth = cache.attend(a_plan())
    assert relative_error(out, truth) < tolerance(INT4)


def test_a_row_of_equal_values_has_the_scale_zero() -> None:
    cache = Coded(World(lengths=(9,), query_heads=2), TURBO)
    cache.views["value_scale"].fill_(0.0)
    out, truth = cache.attend(a_plan())
    assert relative_error(out, truth) < tolerance(TURBO)


@pytest.mark.parametrize("falling", [False, True])
def test_scores_that_climb_or_fall_from_tile_to_tile(falling: bool) -> None:
    """Large keys at either end: what weights are relative to rises late, or is far above nearly all of them."""
    cache = Coded(World(lengths=(80,), q_tokens=3, query_heads=16), INT4)
    tokens = torch.randn(2, 80, 2, 32, generator=torch.Generator().manual_seed(5))
    size = torch.linspace(0.1, 12.0, 80)
    tokens[0] *= (size.flip(0) if falling else size)[:, None, None]
    cache.codec.append(cache.planes, cache.slots(0, 80), tokens[0], tokens[1])
    out, truth = cache.attend(a_plan(rows=32), splits=1)
    assert relative_error(out, truth) < 2 * tolerance(INT4)


# KVarN's tiles

TILES = World(lengths=(300, 0, 129), query_heads=4, page_tokens=128)


def test_sinks_and_open_tiles_lie_beside_and_others_do_not() -> None:
    beside = Coded(TILES, "kvarn_k4v2_g128").views["side_of_tile"]
    assert (beside >= 0).sum() >= 3
    assert (beside == -1).any()


def test_the_last_tile_may_be_quantised_and_seen_in_part() -> None:
    cache = Coded(replace(TILES, lengths=(256,)), "kvarn_k4v2_g64")
    cache.world = replace(cache.world, lengths=(200,), q_tokens=3)  # three more tokens than the sequence has now
    out, truth = cache.attend(a_plan())
    assert relative_error(out, truth) < tolerance("kvarn_k4v2_g64")


def test_a_lost_token_is_nan_for_its_head() -> None:
    cache = Coded(replace(TILES, lengths=(260,)), "kvarn_k4v2_g64")
    tile = int(cache.table[0, 0]) * 2 + 1
    assert cache.views["side_of_tile"][tile] == -1
    cache.views["value_scale"][tile, 1, 5] = torch.nan
    out, _ = cache.attend(a_plan())
    assert out[0, 0, 2:].isnan().all()
    assert out[0, 0, :2].isfinite().all()


# Refusals


@pytest.mark.parametrize(
    ("name", "plan", "splits", "match"),
    [
        (INT4, a_plan(rows=20), 3, "sets have 8 or 16 rows"), ("fp16", a_plan(rows=16, sets=2), 3, "takes one"),
        ("q5_1", a_plan(rows=16), 3, "as columns"),
        ("kvarn_k4v2_g64", a_plan(), 1, "at least 2"), ("kvarn_k4v2_g64", a_plan(rows=16), 3, "takes sets of 8"),
    ],
)  # fmt: skip
def test_plans_that_a_loop_does_not_take_are_refused(name: str, plan: TilePlan, splits: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Coded(of(name, lengths=(5,)), name).attend(plan, splits=splits)


@pytest.mark.parametrize(
    ("name", "plane", "change", "match"),
    [
        (INT8, "key_scale", lambda _: torch.ones(1), "per token and head"),
        (INT8, "key_scale", lambda _: torch.ones(1, 2, 3), "scales"),
        (INT4, "value_scale", lambda view: view[:, :1], "scales"),
        ("q4_0", "value_scale", lambda view: view[:, :1], "scales"),
        (INT4, "key_data", lambda view: view[..., :8], "do not belong together"),
        ("fp16", "key_data", lambda view: view[..., :16], "do not belong together"),
        ("fp16", "key_data", lambda view: torch.zeros(*view.shape[:3], 40).half()[..., 1:33], "aligned"),
        ("q5_1", "key_minimum", lambda view: view.transpose(0, 1).contiguous().transpose(0, 1), "same strides"),
        ("kvarn_k4v2_g64", "key_scale", torch.Tensor.contiguous, "key_scale has strides"),
    ],
)  # fmt: skip
def test_planes_that_do_not_fit_are_refused(name: str, plane: str, change: object, match: str) -> None:
    cache = Coded(of(name, lengths=(5,)), name)
    cache.views = {**cache.views, plane: change(cache.views[plane])}
    with pytest.raises(ValueError, match=match):
        cache.attend(usual(name))


@pytest.mark.parametrize(
    ("place", "change", "match"),
    [
        (2, torch.Tensor.long, "must be int32"), (3, lambda lengths: lengths[:0], "lengths"),
        (4, lambda _out: torch.empty(1, 1, 12, 64)[..., ::2], "neighbours"),
        (0, lambda query: query[:, :0], "do not belong together"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(place: int, change: object, match: str) -> None:
    cache = Coded(World(lengths=(5,)), "fp16")
    query = cache.world.query()
    workspace = Workspace.allocate(batch=1, q_tokens=1, query_heads=12, head_dim=32, splits=1, device=CPU)
    given = [query, cache.views, cache.table, cache.world.lengths_tensor(), torch.empty_like(query), workspace]
    given[place] = change(given[place])
    with pytest.raises(ValueError, match=match):
        attend_plain(*given, plan=usual("fp16"), softmax_scale=1.0)
