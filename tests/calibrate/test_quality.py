"""What formats do to attention: figures that can be worked out on paper, bounds that arithmetic gives, and who wins."""

from collections.abc import Iterator
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from calibrate.attention_errors import (  # noqa: E402 - what needs no torch is imported all the same
    ABSMAX_INT4,
    NotKept,
    Sums,
    absmax_int4,
    concentration_of,
    errors_of,
    kept_in,
    sums_of,
    together,
    truth_of,
)
from calibrate.quality import REFERENCES, SHOWN_EXL3, measure_quality  # noqa: E402
from calibrate.quality_report import quality_json, quality_text  # noqa: E402
from calibrate.synthetic_heads import KINDS, Heads, synthetic_heads  # noqa: E402
from realkernels.codecs import codec_named, codec_names  # noqa: E402
from realkernels.codecs.kvarn import column_logs  # noqa: E402
from tests.calibrate.dumped import some, write  # noqa: E402
from tests.realkernels.codecs.kept import rotation  # noqa: E402
from twin.formats import is_exl3, kv_format  # noqa: E402

SHOWN = [name for name in codec_names() if not is_exl3(name) or name in SHOWN_EXL3]
EXACT = 2.0**-20
"""Of float32 sums and rotations, relative to the largest element."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors of this size are not worth sharing among cores that have other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def test_scores_are_over_the_root_of_the_head_size() -> None:
    truth = truth_of(heads_of([[2.0] * 4, [0.0] * 4], [[1.0] * 4] * 2, [[1.0] * 4]), "cpu")
    assert truth.scores.tolist() == [[[4.0, 0.0]]]
    assert truth.output[0, 0].tolist() == pytest.approx([1.0] * 4)


def test_attention_is_as_concentrated_as_its_weights() -> None:
    """Ten tokens with equal scores, and then one that takes half of it all."""
    even = concentration_of(truth_of(heads_of(np.zeros((10, 1)), np.ones((10, 1)), [[1.0]]), "cpu"))
    assert even.effective_tokens == pytest.approx(10)
    assert (even.top_share, even.first_share) == (pytest.approx(0.1), pytest.approx(0.4))
    keys = np.zeros((10, 1))
    keys[9] = log(9)
    uneven = concentration_of(truth_of(heads_of(keys, np.ones((10, 1)), [[1.0]]), "cpu"))
    assert uneven.effective_tokens == pytest.approx(exp(log(2) / 2 + log(18) / 2), rel=1e-6)
    assert (uneven.top_share, uneven.first_share) == (pytest.approx(1 / 2), pytest.approx(4 / 18))


def test_what_a_query_does_not_see_has_no_part_in_its_figures() -> None:
    keys, values = some(20, 1, 16)[:, 0], some(20, 1, 16, seed=1)[:, 0]
    queries = some(3, 1, 16, seed=2)[:, 0]
    truth = truth_of(heads_of(keys, values, queries, visible=[7, 9, 12]), "cpu")
    spoilt_keys, spoilt_values = truth.keys.clone(), truth.values.clone()
    spoilt_keys[12:] += 100
    spoilt_values[12:] -= 100
    sums = sums_of(truth, spoilt_keys, spoilt_values)
    assert sums.key[0] > 0
    found = errors_of(sums)
    assert (found.score_max, found.kl_mean, found.output_relative_rms) == (0, 0, 0)
    assert sums.score == (0, 7 + 9 + 12)
    assert found.output_cosine_min == pytest.approx(1)
    alone = truth_of(heads_of(keys[:7], values[:7], queries[:1]), "cpu")
    np.testing.assert_allclose(truth.output[0, 0], alone.output[0, 0], rtol=1e-12)
    assert 1 <= concentration_of(truth).effective_tokens <= 12


def test_an_output_of_nothing_has_cosine_1_only_with_itself() -> None:
    truth = truth_of(heads_of([[1.0], [1.0]], [[1.0], [-1.0]], [[1.0]]), "cpu")
    assert float(truth.output.abs().max()) == 0
    assert sums_of(truth, truth.keys, truth.values).cosine.tolist() == [1]
    assert sums_of(truth, truth.keys, truth.values + 1).cosine.tolist() == [0]


def test_sums_of_layers_are_those_of_all_their_heads() -> None:
    parts = [sums_for("exl3_k3v3", synthetic(name)) for name in ("gaussian", "tails")]
    both, errors = together(parts), [errors_of(part) for part in parts]
    found = errors_of(both)
    assert found.score_max == max(each.score_max for each in errors)
    assert found.kl_mean == pytest.approx(sum(each.kl_mean for each in errors) / 2)
    assert found.score_rms == pytest.approx(sqrt(sum(each.score_rms**2 for each in errors) / 2))
    assert min(e.key_relative_rms for e in errors) < found.key_relative_rms < max(e.key_relative_rms for e in errors)
    assert len(both.divergence) == len(both.cosine) == 2 * 2 * 32


# Round trips: no element is further off than the format's arithmetic allows.


def half_step(name: str, plane: int, rows: np.ndarray) -> np.ndarray:
    """Largest error of each element of rows [tokens, D] in the basis in which the format rounds them."""
    bits = (kv_format(name).key, kv_format(name).value)[plane].bits if name != ABSMAX_INT4 else 4
    absmax = np.abs(rows).max(axis=-1, keepdims=True)
    spread = rows.max(axis=-1, keepdims=True) - rows.min(axis=-1, keepdims=True)
    if name in {"fp16", "bf16", "fp32"}:
        return np.abs(rows) * 2.0 ** -{"fp16": 11, "bf16": 8, "fp32": 24}[name] + 2.0**-25
    if name in {"fp8", "fp8_per_token_head"} or (name.startswith("turboquant") and bits == 8):
        scale = absmax / 448 if name.endswith("head") else 1.0
        return np.maximum(np.abs(rows) / 16, scale * 2.0**-10)
    if name in {ABSMAX_INT4, "int8_per_token_head"}:
        return absmax / (14 if name == ABSMAX_INT4 else 254) + 0 * rows
    if name == "int4_per_token_head":  # the zero point is rounded too
        return np.maximum(spread, absmax) / 15 + 0 * rows
    if is_exl3(name) or name in {"q8_0", "q4_0", "q5_1", "iq4_nl"}:
        groups = np.abs(rows).reshape(len(rows), -1, 32).max(axis=-1, keepdims=True).repeat(32, axis=-1)
        # q4_0: a whole step at one end; iq4_nl: 14 of 127 there, and up to 13 % that the least squares move the scale
        shares = {"q8_0": 1 / 254, "q4_0": 1 / 8, "q5_1": 1 / 31, "iq4_nl": 14 / 127 + 0.13}
        share = shares.get(name, 2.0**-bits)
        return (groups * (share + 2.0**-10)).reshape(rows.shape)
    if name.startswith("turboquant") and plane == 1:
        return spread / (2**bits - 1) / 2 + absmax * 2.0**-9 + 0 * rows
    raise AssertionError(name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [ABSMAX_INT4, *(name for name in SHOWN if not name.startswith("kvarn"))],
)
def test_no_element_comes_back_further_off_than_the_arithmetic_allows(name: str, kind: str) -> None:
    heads = synthetic(kind)
    back = kept_in(name, truth_of(heads, "cpu"))
    for plane, (rows, held) in enumerate(zip((heads.keys, heads.values), back[:2], strict=True)):
        if plane == 0 and name.startswith("turboquant") and name.endswith("nc"):
            continue  # directions: by the published share, below
        into = np.eye(128) if name == ABSMAX_INT4 else rotation(name, 128)[plane]
        for head in range(2):
            x, y = (each.astype(float)[:, head] @ into.T for each in (rows, held.numpy()))
            allowed = half_step(name, plane, x) + EXACT * np.abs(x).max(axis=-1, keepdims=True)
            assert (np.abs(y - x) <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in SHOWN if name.startswith("kvarn")])
def test_tiles_come_back_within_half_a_step_of_their_normalised_rows(name: str, kind: str) -> None:
    heads, fmt = synthetic(kind), codec_named(name)
    back = kept_in(name, truth_of(heads, "cpu"))
    tile, into = fmt.tile_tokens, rotation(name, 128)[0]
    assert back[2] == tile
    for plane, (rows, held) in enumerate(zip((heads.keys, heads.values), back[:2], strict=True)):
        bits = (kv_format(name).key, kv_format(name).value)[plane].bits
        x, y = (each.astype(float) @ into.T for each in (rows, held.numpy()))
        sink = np.abs(y - x)[:tile]
        assert (sink <= np.abs(x[:tile]) * 2.0**-11 + EXACT * np.abs(x[:tile]).max()).all()
        for first in range(tile, 512, tile):
            own, error = (each[first : first + tile].transpose(1, 0, 2) for each in (x, np.abs(y - x)))
            if plane == 0:
                own, error = own.swapaxes(1, 2), error.swapaxes(1, 2)  # rows are channels
            column = column_logs(torch.from_numpy(own).float().half().float()).exp().half().double().numpy()
            evened = own / column
            step = (evened.max(axis=-1) - evened.min(axis=-1)) / (2**bits - 1)
            rounded = np.abs(evened).max(axis=-1) * 2.0**-9  # float16: tokens that waited, scale, zero
            assert (error <= (step / 2 + 2 * rounded)[..., None] * column).all()


@pytest.mark.parametrize(("bits", "share"), [(4, 0.009497), (3, 0.03454)])
def test_directions_lose_the_published_share(bits: int, share: float) -> None:
    """Mean squared error of Lloyd's and Max's quantiser; the factor that restores the length adds about its square."""
    found = errors_of(sums_for(f"turboquant_{bits}bit_nc", synthetic("gaussian", tokens=1024)))
    assert found.key_relative_rms**2 == pytest.approx(share + share**2 / 4, rel=0.05)


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("tokens", [512, 777])
def test_appending_in_runs_leaves_what_appending_at_once_does(name: str, tokens: int) -> None:
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


def test_without_loud_channels_the_plain_format_is_nearly_as_good() -> None:
    found = by_name(synthetic("gaussian", tokens=1024), ABSMAX_INT4, "int4_per_token_head")
    ratio = found[ABSMAX_INT4].key_relative_rms / found["int4_per_token_head"].key_relative_rms
    assert 0.8 < ratio < 1.25


def test_a_first_tile_that_stays_in_16_bits_saves_sinks() -> None:
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


# What is measured, and what is left out.


def small(**asked: Any) -> Any:
    return measure_quality(**{"model": "llama-3.1-8b", "tokens": 256, "kv_dtype": "fp8,q4_0", **asked})


def test_all_formats_are_measured_and_those_of_exl3_that_stand_for_the_others() -> None:
    measured = small(kv_dtype=None)
    names = [row.name for row in measured.samples[0].formats]
    assert names[:2] == list(REFERENCES)
    assert sorted(names) == sorted([ABSMAX_INT4, *SHOWN])
    assert [sample.name for sample in measured.samples] == list(KINDS)
    sizes = [measured.token_bytes[name] for name in names[2:]]
    assert sizes == sorted(sizes, reverse=True)


def test_bytes_are_those_of_the_planes_for_all_heads_of_the_model() -> None:
    for model, kv_heads, head_dim in (("llama-3.1-8b", 8, 128), ("qwen3.8-27b", 4, 256)):
        measured = small(model=model, kv_dtype=None, tokens=32)
        for name, size in measured.token_bytes.items():
            if name == ABSMAX_INT4:
                assert size == measured.token_bytes["int4_per_token_head"]
            else:
                assert size == kv_format(name).plane_bytes(kv_heads=kv_heads, head_dim=head_dim)


def test_a_seed_gives_the_same_answer_and_another_one_another() -> None:
    one, same, other = (quality_json(small(seed=seed)) for seed in (None, 0, 1))
    assert one == same
    assert one["samples"] != other["samples"]


def test_threads_are_given_back() -> None:
    torch.set_num_threads(2)
    small()
    assert torch.get_num_threads() == 2


def test_progress_goes_from_none_to_nearly_all() -> None:
    told: list[tuple[int, int]] = []
    small(progress=lambda done, total, _: told.append((done, total)))
    assert told == sorted(told)
    assert told[0] == (0, 4 * 4)
    assert told[-1] == (15, 16)


def test_a_format_that_does_not_fit_is_left_out_with_the_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.safetensors", k=some(64, 2, 40), v=some(64, 2, 40, seed=1))
    measured = measure_quality(tensors=path)
    assert "exl3_k4v4" in measured.left_out
    assert "multiples of 32, not 40" in measured.left_out["q4_0"]
    kept = {row.name for row in measured.samples[0].formats}
    assert {"fp16", ABSMAX_INT4, "fp8", "int8_per_token_head"} <= kept
    assert not kept & measured.left_out.keys()
    assert "q4_0 is left out: " in quality_text(measured)


def test_numbers_that_a_format_cannot_hold_leave_it_out_of_all_layers(tmp_path: Path) -> None:
    """What exceeds float16 comes back as infinity: no error of attention, but no cache either."""
    tensors = {f"layers__{n}__{x}": some(64, 2, 64, seed=n) * (1e5 if n else 1) for n in range(2) for x in "kv"}
    measured = measure_quality(tensors=write(tmp_path / "large.safetensors", **tensors), kv_dtype="bf16,exl3_k4v4")
    assert set(measured.left_out) == {"fp16", "exl3_k4v4"}
    assert "comes back as no finite number (layer 1)" in measured.left_out["fp16"]
    assert [[row.name for row in sample.formats] for sample in measured.samples] == [[ABSMAX_INT4, "bf16"]] * 2
    assert quality_json(measured)["pooled"]


def test_heads_that_a_format_has_no_room_for_are_a_reason_and_not_a_crash() -> None:
    truth = truth_of(synthetic("gaussian", dims=40), "cpu")
    with pytest.raises(NotKept, match="power of two"):
        kept_in("int4_per_token_head", truth)


# Files.


def test_queries_of_a_file_see_what_came_before_them(tmp_path: Path) -> None:
    keys, values, queries = some(64, 2, 32), some(64, 2, 32, seed=1), some(64, 6, 32, seed=2)
    measured = measure_quality(tensors=write(tmp_path / "own", k=keys, v=values, q=queries), kv_dtype="fp8")
    (sample,) = measured.samples
    places = np.unique(np.linspace(32, 63, 43).round())
    assert (sample.generated, measured.seed) == (False, None)
    assert (sample.tokens, sample.heads, sample.queries) == (64, 2, 2 * 3 * len(places))
    fp8 = next(row for row in sample.formats if row.name == "fp8")
    assert fp8.sums.score[1] == 2 * 3 * sum(place + 1 for place in places)
    # Query head 5 belongs to KV head 1: by hand for the last token.
    scores = keys[:, 1] @ queries[63, 5] / sqrt(32)
    weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    from calibrate.quality_heads import dumped

    truth = truth_of(dumped(tmp_path / "own", None, None, None).makers[0](), "cpu")
    np.testing.assert_allclose(truth.output[1, -1], weights @ values[:, 1], rtol=1e-6)


def test_queries_are_made_up_where_a_file_has_none(tmp_path: Path) -> None:
    measured = measure_quality(tensors=write(tmp_path / "own", k=some(64), v=some(64, seed=1)), kv_dtype="fp8")
    assert (measured.samples[0].generated, measured.seed) == (True, 0)
    assert "made-up queries" in quality_text(measured)
    other = measure_quality(tensors=tmp_path / "own", kv_dtype="fp8", seed=1)
    assert quality_json(measured)["samples"] != quality_json(other)["samples"]


def test_the_first_tokens_of_a_file_may_be_all_that_is_measured(tmp_path: Path) -> None:
    path = write(tmp_path / "own", k=some(64), v=some(64, seed=1))
    short = write(tmp_path / "short", k=some(64)[:32], v=some(64, seed=1)[:32])
    one, other = measure_quality(tensors=path, tokens=32, kv_dtype="q8_0,fp8"), measure_quality(tensors=short)
    assert one.samples[0].tokens == other.samples[0].tokens == 32
    by_hand = {row.name: row.errors for row in other.samples[0].formats}
    assert all(row.errors == by_hand[row.name] for row in one.samples[0].formats)


def test_layers_are_shown_together_and_each_where_asked(tmp_path: Path) -> None:
    tensors = {f"layers__{n}__{x}": some(64, 2, 32, seed=3 * n + ord(x)) for n in (4, 7, 11) for x in "kvq"}
    tensors["layers__7__k"] *= 8  # where attention moves most
    measured = measure_quality(tensors=write(tmp_path / "layers", **tensors), kv_dtype="exl3_k4v4,q4_0")
    text, explained = quality_text(measured), quality_text(measured, explain=True)
    assert "all 3 layers together" in text
    assert "\n  192 tokens, 192 queries: of the file\n" in text
    assert text.count("(layer 7)") == len(measured.pooled) - 1  # float16 holds these exactly
    assert "\nlayer 4\n" not in text
    assert all(f"\nlayer {number}\n" in explained for number in (4, 7, 11))
    pooled = {row["kv_dtype"]: row for row in quality_json(measured)["pooled"]}
    each = [sample["formats"] for sample in quality_json(measured)["samples"]]
    for position, name in enumerate(pooled):
        assert pooled[name]["kl_mean"] == pytest.approx(np.mean([rows[position]["kl_mean"] for rows in each]))


def test_layers_whose_queries_are_made_up_are_named(tmp_path: Path) -> None:
    tensors = {f"layers__{n}__{x}": some(64, 2, 32, seed=n + ord(x)) for n in (1, 2) for x in "kv"}
    both = quality_text(measure_quality(tensors=write(tmp_path / "none", **tensors), kv_dtype="fp8"))
    assert "queries: made up\n" in both
    tensors["layers__2__q"] = some(64, 2, 32)
    one = quality_text(measure_quality(tensors=write(tmp_path / "one", **tensors), kv_dtype="fp8"))
    assert "queries: of the file, made up for layer 1\n" in one


# Measured and published stand apart.


def test_what_is_published_stands_apart_and_names_its_source() -> None:
    measured = small(model="qwen3.8-27b", kv_dtype="kvarn_k4v2_g128,q4_0")
    here, _, elsewhere = quality_text(measured).partition("PUBLISHED, not measured here: answers of qwen3.8-27b")
    assert "8.236" in elsewhere
    assert "8.236" not in here
    assert "source: docs/long-context.md of syv-ai/qwen38-27b-rtx3090" in elsewhere
    document = quality_json(measured)
    assert {row["kv_dtype"] for row in document["published_quality"]} == {"kvarn_k4v2_g128"}
    assert all(row["source"] and row["conditions"] for row in document["published_quality"])
    assert "perplexity" not in str(document["samples"])


def test_nothing_published_is_said_to_be_nothing() -> None:
    assert "PUBLISHED, not measured here: answers of llama-3.1-8b: nothing for these formats" in quality_text(small())


def test_a_file_is_of_no_model_unless_one_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "own", k=some(64, 4, 256), v=some(64, 4, 256, seed=1))
    unnamed = measure_quality(tensors=path, kv_dtype="fp8")
    assert quality_json(unnamed)["published_quality"] == []
    assert "PUBLISHED figures are shown where --model says" in quality_text(unnamed)
    named = measure_quality(tensors=path, kv_dtype="fp8", model="qwen3.8-27b")
    assert {row["value"] for row in quality_json(named)["published_quality"]} >= {8.223, 8.235}


def test_the_published_first_tile_is_told_beside_the_bytes() -> None:
    text = quality_text(small(kv_dtype="kvarn_k4v2_g64,kvarn_k4v4_g128", tokens=300))
    assert "kvarn_k4v2_g64: 108 of 300 tokens stay in 16 bits" in text  # 64 of the first tile, 44 of the last
    assert "kvarn_k4v4_g128: 172 of 300 tokens stay in 16 bits" in text


def test_heads_that_are_chosen_are_shown_in_full() -> None:
    text = quality_text(small(heads="sinks"))
    assert "\nsinks: the first 4 tokens" in text
    assert "\noutliers: a few" not in text
    assert "\noutliers: a few" in quality_text(small(heads="sinks"), explain=True)


def test_one_set_of_heads_is_not_compared_with_itself() -> None:
    measured = small()
    assert "all kinds of heads" in quality_text(measured)
    alone = replace(measured, samples=measured.samples[:1])
    assert "all kinds of heads" not in quality_text(alone)
