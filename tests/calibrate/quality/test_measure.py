"""What `twin quality` measures and leaves out, heads of a file, and what is published, which stands apart."""

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from calibrate.quality.errors import ABSMAX_INT4, truth_of  # noqa: E402 - what needs no torch is imported all the same
from calibrate.quality.heads import KINDS, dumped  # noqa: E402
from calibrate.quality.measure import REFERENCES, SHOWN_EXL3, measure_quality  # noqa: E402
from calibrate.quality.report import quality_json, quality_text  # noqa: E402
from realkernels.codecs import codec_names  # noqa: E402
from tests.calibrate.quality.dumped import some, write  # noqa: E402
from twin.formats import is_exl3, kv_format  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SHOWN = [name for name in codec_names() if not is_exl3(name) or name in SHOWN_EXL3]


def small(**asked: Any) -> Any:
    return measure_quality(**{"model": "llama-3.1-8b", "tokens": 256, "kv_dtype": "fp8,q4_0", **asked})


@pytest.mark.parametrize(("model", "kv_heads", "head_dim"), [("llama-3.1-8b", 8, 128), ("qwen3.8-27b", 4, 256)])
def test_all_formats_are_measured_in_the_bytes_of_their_planes_and_of_exl3_those_that_stand_for_the_others(
    model: str, kv_heads: int, head_dim: int
) -> None:
    measured = small(model=model, kv_dtype=None, tokens=32)
    names = [row.name for row in measured.samples[0].formats]
    assert names[:2] == list(REFERENCES)
    assert sorted(names) == sorted([ABSMAX_INT4, *SHOWN])
    assert [sample.name for sample in measured.samples] == list(KINDS)
    planes = {name: kv_format(name).plane_bytes(kv_heads=kv_heads, head_dim=head_dim) for name in SHOWN}
    assert measured.token_bytes == planes | {ABSMAX_INT4: planes["int4_per_token_head"]}
    sizes = [measured.token_bytes[name] for name in names[2:]]
    assert sizes == sorted(sizes, reverse=True)


def test_a_seed_gives_the_same_answer_and_another_one_another_and_threads_are_given_back() -> None:
    torch.set_num_threads(2)
    one, same, other = (quality_json(small(seed=seed)) for seed in (None, 0, 1))
    assert one == same
    assert one["samples"] != other["samples"]
    assert torch.get_num_threads() == 2


def test_progress_goes_from_none_to_nearly_all() -> None:
    told: list[tuple[int, int]] = []
    small(progress=lambda done, total, _: told.append((done, total)))
    assert told == sorted(told)
    assert (told[0], told[-1]) == ((0, 4 * 4), (15, 16))


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
    truth = truth_of(dumped(tmp_path / "own", None, None, None).makers[0](), "cpu")
    np.testing.assert_allclose(truth.output[1, -1], weights @ values[:, 1], rtol=1e-6)


def test_queries_are_made_up_where_a_file_has_none_and_layers_without_are_named(tmp_path: Path) -> None:
    measured = measure_quality(tensors=write(tmp_path / "own", k=some(64), v=some(64, seed=1)), kv_dtype="fp8")
    assert (measured.samples[0].generated, measured.seed) == (True, 0)
    assert "made-up queries" in quality_text(measured)
    other = measure_quality(tensors=tmp_path / "own", kv_dtype="fp8", seed=1)
    assert quality_json(measured)["samples"] != quality_json(other)["samples"]
    tensors = {f"layers__{n}__{x}": some(64, 2, 32, seed=n + ord(x)) for n in (1, 2) for x in "kv"}
    for own, said in ({}, "made up"), ({"layers__2__q": some(64, 2, 32)}, "of the file, made up for layer 1"):
        path = write(tmp_path / "own", **tensors, **own)
        assert f"queries: {said}\n" in quality_text(measure_quality(tensors=path, kv_dtype="fp8"))


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


def test_a_file_is_of_no_model_unless_one_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "own", k=some(64, 4, 256), v=some(64, 4, 256, seed=1))
    unnamed = measure_quality(tensors=path, kv_dtype="fp8")
    assert quality_json(unnamed)["published_quality"] == []
    assert "PUBLISHED figures are shown where --model says" in quality_text(unnamed)
    named = measure_quality(tensors=path, kv_dtype="fp8", model="qwen3.8-27b")
    assert {row["value"] for row in quality_json(named)["published_quality"]} >= {8.223, 8.235}


def test_heads_that_are_chosen_are_shown_in_full_beside_an_overview_of_all_and_what_stays_in_16_bits() -> None:
    measured = small(heads="sinks", kv_dtype="kvarn_k4v2_g64,kvarn_k4v4_g128", tokens=300)
    text = quality_text(measured)
    assert "\nsinks: the first 4 tokens" in text
    assert "\noutliers: a few" not in text
    assert "\noutliers: a few" in quality_text(measured, explain=True)
    assert "answers of llama-3.1-8b: nothing for these formats" in text
    assert "all kinds of heads" in text
    assert "all kinds of heads" not in quality_text(replace(measured, samples=measured.samples[:1]))
    assert "kvarn_k4v2_g64: 108 of 300 tokens stay in 16 bits" in text  # 64 of the first tile, 44 of the last
    assert "kvarn_k4v4_g128: 172 of 300 tokens stay in 16 bits" in text
