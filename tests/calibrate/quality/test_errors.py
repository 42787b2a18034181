"""What formats do to attention: figures worked out on paper, and who wins."""

from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from calibrate.quality.errors import (  # noqa: E402 - what needs no torch is imported all the same
    ABSMAX_INT4,
    NotKept,
    Sums,
    absmax_int4,
    errors_of,
    kept_in,
    sums_of,
    together,
    truth_of,
)
from calibrate.quality.heads import KINDS, Heads, synthetic_heads  # noqa: E402
from calibrate.quality.measure import SHOWN_EXL3  # noqa: E402
from realkernels.codecs import codec_named, codec_names  # noqa: E402
from tests.calibrate.quality.dumped import some  # noqa: E402
from twin.formats import is_exl3  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SHOWN = [name for name in codec_names() if not is_exl3(name) or name in SHOWN_EXL3]


def heads_of(keys: Any, values: Any, queries: Any, visible: Any = None) -> Heads:
    """[tokens, 1, D] twice, [n, D]."""
    keys, values, queries = (np.asarray(rows, np.float32) for rows in (keys, values, queries))
    seen = np.full(len(queries), len(keys)) if visible is None else np.asarray(visible)
    return Heads(
        name="toy", about="", keys=keys[:, None], values=values[:, None], queries=queries[None], visible=seen,
        generated=False,
    )  # fmt: skip


def synthetic(name: str, *, tokens: int = 512, dims: int = 128) -> Heads:
    return synthetic_heads(name, tokens=tokens, kv_heads=2, head_dim=dims, seed=5, queries=32)


def sums_for(name: str, heads: Heads) -> Sums:
    truth = truth_of(heads, "cpu")
    keys, values, _ = kept_in(name, truth)
    return sums_of(truth, keys, values)


# Two tokens, one query, D = 1: p = sigmoid of the score's difference.


def test_the_figures_of_two_tokens_are_those_worked_out_on_paper() -> None:
    truth = truth_of(heads_of([[1.0], [0.0]], [[1.0], [-1.0]], [[log(3)]]), "cpu")
    sums = sums_of(truth, torch.tensor([[[0.0]], [[0.0]]]), torch.tensor([[[1.0]], [[-3.0]]]))
    found = errors_of(sums)
    # scores ln 3, 0: weights 3/4, 1/4, output 1/2. Kept: 0, 0: weights 1/2, 1/2, output -1.
    assert found.key_relative_rms == pytest.approx(1)
    assert found.value_relative_rms == pytest.approx(sqrt(4 / 2))
    assert found.score_rms == pytest.approx(log(3) / sqrt(2))
    assert found.score_max == pytest.approx(log(3))
    divergence = 3 / 4 * log(3 / 2) + 1 / 4 * log(1 / 2)
    assert (found.kl_mean, found.kl_p99) == (pytest.approx(divergence), pytest.approx(divergence))
    assert found.output_relative_rms == pytest.approx(3)
    assert (found.output_cosine_mean, found.output_cosine_min) == (-1, -1)
    truth = truth_of(heads_of([[2.0] * 4, [0.0] * 4], [[1.0] * 4] * 2, [[1.0] * 4]), "cpu")
    assert truth.scores.tolist() == [[[4.0, 0.0]]]
    assert truth.output[0, 0].tolist() == pytest.approx([1.0] * 4)
    truth = truth_of(heads_of([[1.0], [1.0]], [[1.0], [-1.0]], [[1.0]]), "cpu")
    assert float(truth.output.abs().max()) == 0
    assert sums_of(truth, truth.keys, truth.values).cosine.tolist() == [1]
    assert sums_of(truth, truth.keys, truth.values + 1).cosine.tolist() == [0]


def test_attention_is_as_concentrated_as_its_weights() -> None:
    """Ten tokens with equal scores, and then one that takes half of it all."""
    even = truth_of(heads_of(np.zeros((10, 1)), np.ones((10, 1)), [[1.0]]), "cpu").concentration
    assert even.effective_tokens == pytest.approx(10)
    assert (even.top_share, even.first_share) == (pytest.approx(0.1), pytest.approx(0.4))
    keys = np.zeros((10, 1))
    keys[9] = log(9)
    uneven = truth_of(heads_of(keys, np.ones((10, 1)), [[1.0]]), "cpu").concentration
    assert uneven.effective_tokens == pytest.approx(exp(log(2) / 2 + log(18) / 2), rel=1e-6)
    assert (uneven.top_share, uneven.first_share) == (pytest.approx(1 / 2), pytest.approx(4 / 18))


def test_what_a_query_does_not_see_has_no_part_in_its_figures() -> None:
    keys, values, queries = (some(tokens, 1, 16, seed=seed)[:, 0] for seed, tokens in enumerate((20, 20, 3)))
    truth = truth_of(heads_of(keys, values, queries, visible=[7, 9, 12]), "cpu")
    spoilt_keys, spoilt_values = truth.keys.clone(), truth.values.clone()
    spoilt_keys[12:] += 100
    spoilt_values[12:] -= 100
    sums = sums_of(truth, spoilt_keys, spoilt_values)
    assert sums.key[0] > 0
    found = errors_of(sums)
    assert (found.score_max, found.kl_mean, found.output_relative_rms) == (0, 0, 0)
    assert sums.score.tolist() == [0, 7 + 9 + 12]
    assert found.output_cosine_min == pytest.approx(1)
    alone = truth_of(heads_of(keys[:7], values[:7], queries[:1]), "cpu")
    np.testing.assert_allclose(truth.output[0, 0], alone.output[0, 0], rtol=1e-12)
    assert 1 <= truth.concentration.effective_tokens <= 12


def test_sums_of_layers_are_those_of_all_their_heads() -> None:
    parts = [sums_for("exl3_k3v3", synthetic(name)) for name in ("gaussian", "tails")]
    both, errors = together(parts), [errors_of(part) for part in parts]
    found = errors_of(both)
    assert found.score_max == max(each.score_max for each in errors)
    assert found.kl_mean == pytest.approx(sum(each.kl_mean for each in errors) / 2)
    assert found.score_rms == pytest.approx(sqrt(sum(each.score_rms**2 for each in errors) / 2))
    assert min(e.key_relative_rms for e in errors) < found.key_relative_rms < max(e.key_relative_rms for e in errors)
    assert len(both.divergence) == len(both.cosine) == 2 * 2 * 32


# What a format keeps: its codec's own round trip, whose bounds are tested with the codecs.


@pytest.mark.parametrize("name", SHOWN)
def test_appending_in_runs_leaves_what_appending_at_once_does(name: str) -> None:
    tokens = 777
    heads = synthetic("outliers", tokens=tokens)
    truth, fmt = truth_of(heads, "cpu"), codec_named(name)
    pages = -(-tokens // max(16, fmt.tile_tokens))
    planes = fmt.allocate(pages, max(16, fmt.tile_tokens), 2, 128, torch.device("cpu"))
    for token in range(0, tokens, fmt.tile_tokens if fmt.tile_tokens > 1 else tokens):
        part = slice(token, min(token + fmt.tile_tokens, tokens) if fmt.tile_tokens > 1 else tokens)
        fmt.append(planes, range(part.start, part.stop), truth.keys[part], truth.values[part])
    keys, values = fmt.restore(planes, range(tokens))
    found = kept_in(name, truth)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)
    assert found[2] == (fmt.tile_tokens + tokens % fmt.tile_tokens if fmt.tile_tokens > 1 else 0)


def test_the_reference_is_four_bits_of_the_largest_magnitude() -> None:
    rows = torch.tensor([[7.0, -3.4, 0.6, 0.4], [0.0, 0.0, 0.0, 0.0], [-14.0, 3.1, 2.9, 1.0]])
    assert absmax_int4(rows).tolist() == [[7, -3, 1, 0], [0, 0, 0, 0], [-14, 4, 2, 0]]


# Who wins.


def by_name(heads: Heads, *names: str) -> dict[str, Any]:
    return {name: errors_of(sums_for(name, heads)) for name in names}


FOUR_BITS = ("int4_per_token_head", "kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k4v2_g64")


@pytest.mark.parametrize("dims", [128, 256])
def test_loud_channels_cost_the_plain_format_attention_and_the_others_little(dims: int) -> None:
    found = by_name(synthetic("outliers", tokens=1024, dims=dims), ABSMAX_INT4, *FOUR_BITS)
    plain = found.pop(ABSMAX_INT4)
    for errors in found.values():
        assert errors.key_relative_rms < plain.key_relative_rms / 2
        assert errors.score_rms < plain.score_rms / 2
        assert errors.kl_mean < plain.kl_mean / 5
        assert errors.output_relative_rms < plain.output_relative_rms
        assert errors.output_cosine_mean > plain.output_cosine_mean


def test_without_loud_channels_the_plain_format_is_nearly_as_good_and_a_first_tile_in_16_bits_saves_sinks() -> None:
    found = by_name(synthetic("gaussian", tokens=1024), ABSMAX_INT4, "int4_per_token_head")
    assert 0.8 < found[ABSMAX_INT4].key_relative_rms / found["int4_per_token_head"].key_relative_rms < 1.25
    found = by_name(synthetic("sinks", tokens=1024), "kvarn_k4v4_g128", "int4_per_token_head", ABSMAX_INT4)
    kvarn = found.pop("kvarn_k4v4_g128")
    assert all(kvarn.score_max < other.score_max for other in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_more_bits_never_lose_more(kind: str) -> None:
    names = [*reversed(SHOWN_EXL3), "fp16", "fp32"]
    found = list(by_name(synthetic(kind), *names).values())
    for figure in ("key_relative_rms", "value_relative_rms", "score_rms", "kl_mean", "output_relative_rms"):
        series = [getattr(errors, figure) for errors in found]
        assert series == sorted(series, reverse=True), figure
    assert found[-1].score_max == found[-1].kl_mean == found[-1].output_relative_rms == 0


def test_heads_that_a_format_has_no_room_for_are_a_reason_and_not_a_crash() -> None:
    truth = truth_of(synthetic("gaussian", dims=40), "cpu")
    with pytest.raises(NotKept, match="power of two"):
        kept_in("int4_per_token_head", truth)
