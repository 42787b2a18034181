"""Made-up heads are what their formulas say, and attention over them is as peaked as the module claims."""

from math import log, sqrt

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import kurtosis

import cli
from calibrate.quality.heads import KINDS, QUERIES, SINKS, TARGETS, Heads, looking_for, synthetic_heads

TOKENS, DIMS = 2048, 128
Array = np.ndarray


def made(name: str, *, seed: int = 0, tokens: int = TOKENS) -> Heads:
    return synthetic_heads(name, tokens=tokens, kv_heads=2, head_dim=DIMS, seed=seed)


def attention(heads: Heads) -> Array:
    """[kv_heads, n, tokens]."""
    scores = np.einsum("hqd,thd->hqt", heads.queries.astype(float), heads.keys) / sqrt(heads.keys.shape[-1])
    return softmax(scores, axis=-1)


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_gives_the_same_heads_and_another_seed_or_kind_others(name: str) -> None:
    one, same, other = made(name), made(name), made(name, seed=1)
    for part in ("keys", "values", "queries"):
        np.testing.assert_array_equal(getattr(one, part), getattr(same, part))
        assert (getattr(one, part) != getattr(other, part)).mean() > 0.99
    assert all((one.values != made(kind).values).mean() > 0.99 for kind in KINDS if kind != name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("tokens", "kv_heads", "dims"), [(16, 1, 8), (300, 3, 40), (4096, 1, 256)])
def test_shapes_are_those_asked_for_and_all_numbers_finite(name: str, tokens: int, kv_heads: int, dims: int) -> None:
    heads = synthetic_heads(name, tokens=tokens, kv_heads=kv_heads, head_dim=dims, seed=3)
    assert heads.keys.shape == heads.values.shape == (tokens, kv_heads, dims)
    assert heads.queries.shape == (kv_heads, QUERIES, dims)
    assert (heads.visible == tokens).all()
    for part in (heads.keys, heads.values, heads.queries):
        assert part.dtype == np.float32
        assert np.isfinite(part).all()


@pytest.mark.parametrize("name", ["gaussian", "tails"])
def test_elements_have_variance_1_nothing_in_common_and_the_tails_of_their_kind(name: str) -> None:
    heads = made(name)
    for part in (heads.keys, heads.values):
        assert part.mean() == pytest.approx(0, abs=0.01)
        assert part.var() == pytest.approx(1, abs=0.05)
        heaviness = kurtosis(part.ravel())  # of t with 4 degrees it is infinite
        assert heaviness == pytest.approx(0, abs=0.1) if name == "gaussian" else heaviness > 5
    assert np.corrcoef(heads.keys.ravel(), heads.values.ravel())[0, 1] == pytest.approx(0, abs=0.01)


def test_outliers_lie_in_the_same_few_channels_of_every_token() -> None:
    heads = made("outliers")
    for head in range(2):
        keys = heads.keys[:, head]
        deviation, mean = keys.std(axis=0), keys.mean(axis=0)
        loud = deviation > 2
        assert loud.sum() == DIMS // 64
        assert ((deviation[loud] > 4.5) & (deviation[loud] < 21)).all()
        assert ((abs(mean / deviation)[loud] > 0.9) & (abs(mean / deviation)[loud] < 3.2)).all()
        np.testing.assert_allclose(deviation[~loud], 1, atol=0.1)
        np.testing.assert_allclose(mean[~loud], 0, atol=0.1)
    assert heads.values.std() == pytest.approx(1, abs=0.01)


def test_sinks_have_long_keys_alike_and_small_values() -> None:
    heads = made("sinks")
    lengths = np.linalg.norm(heads.keys, axis=-1) / sqrt(DIMS)
    np.testing.assert_allclose(lengths[:SINKS], 10, atol=0.5)
    np.testing.assert_allclose(lengths[SINKS:], 1, atol=0.3)
    np.testing.assert_allclose(np.linalg.norm(heads.values[:SINKS], axis=-1) / sqrt(DIMS), 0.05, atol=0.02)
    first, second = heads.keys[0], heads.keys[1]
    cosine = (first * second).sum(-1) / np.linalg.norm(first, axis=-1) / np.linalg.norm(second, axis=-1)
    assert (cosine > 0.95).all()


@pytest.mark.parametrize("name", ["gaussian", "outliers", "tails"])
def test_half_of_the_attention_is_on_four_tokens_and_a_third_on_the_first(name: str) -> None:
    found = attention(made(name))
    weights = np.sort(found, axis=-1)
    assert weights[..., -1].mean() == pytest.approx(1 / 3, abs=0.08)
    assert weights[..., -TARGETS:].sum(axis=-1).mean() == pytest.approx(1 / 2, abs=0.08)
    entropy = -(weights * np.log(weights)).sum(axis=-1)
    assert 20 < np.exp(np.median(entropy)) < TOKENS / 5
    assert found[..., :SINKS].sum(axis=-1).mean() < 0.02


def test_sinks_take_most_of_the_attention_and_score_what_they_were_asked_to() -> None:
    sinks = made("sinks")
    assert attention(sinks)[..., :SINKS].sum(axis=-1).mean() == pytest.approx(0.6, abs=0.08)
    for sink_score in (0.0, 3.0, log(TOKENS)):
        queries = looking_for(np.random.default_rng(1), sinks.keys, count=16, sink_score=sink_score)
        scores = np.einsum("hqd,thd->hqt", queries.astype(float), sinks.keys) / sqrt(DIMS)
        above = scores[..., :SINKS] - scores[..., SINKS:].mean(axis=-1, keepdims=True)
        np.testing.assert_allclose(above, sink_score, atol=1e-3)


def test_scores_are_spread_alike_whatever_the_channels_scales_are() -> None:
    """A query is in units of the channels: scaling and shifting K changes no attention, and K alike gives numbers."""
    keys = made("gaussian").keys
    moved = (keys * np.geomspace(0.5, 2, DIMS) + np.linspace(-5, 5, DIMS)).astype(np.float32)
    weights = []
    for rows in (keys, moved):
        queries = looking_for(np.random.default_rng(1), rows, count=16, sink_score=None)
        scores = np.einsum("hqd,thd->hqt", queries.astype(float), rows.astype(float)) / sqrt(DIMS)
        weights.append(softmax(scores, axis=-1))
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-3, atol=1e-7)
    alike = np.full((32, 1, 8), 3.0, np.float32)
    for sink_score in (None, 0.0):
        assert np.isfinite(looking_for(np.random.default_rng(0), alike, count=8, sink_score=sink_score)).all()


def test_another_kind_is_not_known_and_the_command_line_knows_these() -> None:
    with pytest.raises(KeyError):
        made("uniform")
    option = next(option for option in cli.twin.commands["quality"].params if option.name == "heads")
    assert list(option.type.choices) == list(KINDS)
