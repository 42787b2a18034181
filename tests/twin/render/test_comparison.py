"""A comparison shows every choice, why one is missing, and what is published of its answers beside its source."""

import pytest
from msgspec.structs import replace

from twin.answers.comparison import Comparison, compare_all
from twin.ask.question import Question
from twin.cost import roofline
from twin.render.comparison import comparison_text

LAYOUTS = Question(ctx_tokens=1 << 20)
FORMATS = Question(ctx_tokens=100_000, model="qwen3.8-27b")
DOCS = "docs/long-context.md of syv-ai/qwen38-27b-rtx3090"


def rows(compared: Comparison) -> dict[str, list[str]]:
    """The rows of a table of formats, without what stands below it."""
    lines = comparison_text(compared).splitlines()[3:]
    return {line.split()[0]: line.split() for line in lines[: len(compared.predictions)]}


def test_a_layout_that_does_not_fit_says_why_and_shows_no_speed_nor_does_a_prompt_without_prefill() -> None:
    shown, short = (
        {line[:16].strip(): line.split() for line in comparison_text(compare_all(question)).splitlines()[3:]}
        for question in (LAYOUTS, Question(ctx_tokens=1))
    )
    assert shown["decode"][-1] == "-"
    assert "the machine has 70.68 GiB" in " ".join(shown["why not"])
    assert short["prefill"][-2:] == short["prefill wall"][-2:] == ["-", "-"]


def test_milliseconds_a_token_are_those_of_one_sequence() -> None:
    alone, four = (
        compare_all(Question(ctx_tokens=8192, model="qwen3.8-27b", batch=batch), formats=["fp8"]) for batch in (1, 4)
    )
    step_s = four.predictions[0].decode
    assert step_s is not None
    assert f"{step_s.seconds.value * 1000:.1f}" in rows(four)["fp8"]
    assert ", 4 sequences\n" in comparison_text(four)
    assert ", 1 sequence" not in comparison_text(alone)


def test_published_quality_stands_beside_its_format_and_its_source_below() -> None:
    text = comparison_text(compare_all(FORMATS, formats=["fp8", "turboquant_k8v4", "bf16"]))
    fp8, turbo, bf16 = text.splitlines()[3:6]
    assert fp8.endswith("8.223 / 8.235      100k, greedy")
    assert "+1.17 % elsewhere" in turbo  # a change on another model is no perplexity of this one
    assert bf16.split()[-2:] == ["-", "-"]
    assert f"published, not predicted: {DOCS}\n" in text
    assert "published, not predicted: docstring of vLLM 0.28.0 quantization/turboquant\n" in text


def test_every_row_names_the_kernel_of_its_speed_and_where_its_rates_are_from() -> None:
    about = replace(FORMATS, utilisation=0.9)
    compared = compare_all(about, formats=["bf16", "fp8", "int8_per_token_head", "turboquant_3bit_nc"])
    known = {"fp8": "fitted", "int8_per_token_head": "fitted", "turboquant_3bit_nc": "typical"}
    for each in compared.predictions:
        shown = " ".join(rows(compared)[each.case.fmt.name])
        if each.decode is not None:
            assert each.kernel == each.case.attention_kernel("attend_decode")
            assert f"{each.case.backend}, {known.pop(each.case.fmt.name)}" in shown
    assert not known  # in bf16 so many tokens do not fit
    text = comparison_text(compared)
    assert "speeds are those of vllm's kernels; " in text
    assert "twin formats --hw rtx3090\n" in text


def test_rates_that_no_machine_has_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "borrowed", lambda *_: None)
    text = comparison_text(compare_all(replace(FORMATS, utilisation=0.9), formats=["fp8", "turboquant_3bit_nc"]))
    (note,) = (line for line in text.splitlines() if line.startswith("  turboquant_3bit_nc: "))
    assert note.count("machine rtx3090 has no rate for ") == 1
    assert "attend_decode/turboquant/turboquant_3bit_nc, append/" in note


def test_rates_that_were_carried_over_and_a_context_beyond_the_models_own_are_told_once() -> None:
    long, text = (
        comparison_text(compare_all(replace(FORMATS, ctx_tokens=tokens), formats=["bf16", "fp8"]))
        for tokens in (300_000, 8192)
    )
    (line,) = (line for line in text.splitlines() if "carried over from" in line)
    assert line.startswith("  bf16: ")
    assert "an H200" in line
    assert long.count("300,000 tokens are beyond the model's own 262,144") == 1
    own = Question(ctx_tokens=8192, model="llama-3.1-8b", hw="h200", engine="twin", layout="vram")
    assert "twin formats" not in comparison_text(compare_all(own, formats=["fp8"]))  # not pointed to from themselves
    assert "beyond" not in text
