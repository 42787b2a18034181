"""A headline stands alone, says what was asked and what is sure, and rounds without hiding; so does a document."""

import re

import pytest
from msgspec.structs import replace

from hwprofiles import load_profile
from twin.ask.question import Question
from twin.assumptions import ASSUMPTIONS
from twin.cost import roofline
from twin.prediction import Prediction, Quantity, predict
from twin.render.as_json import prediction_json
from twin.render.text import explain, headline, rate, table
from twin.units import MAX_TOKENS

MACHINE = load_profile("3x-rtx3090")


def asked(ctx_tokens: int = 1 << 20, layout: str = "offload", **more: str | int) -> Prediction:
    return predict(Question(ctx_tokens=ctx_tokens, layout=layout, **more), MACHINE)  # type: ignore[arg-type]


def rows(text: str) -> dict[str, str]:
    """The rows of a headline by name; rows without one belong to the row above."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines()[3:]:
        name = line[2:14].strip() or f"{name}, continued"
        found[name] = line[15:]
    return found


def test_a_headline_repeats_the_question_in_full() -> None:
    first, second = headline(asked(layout="vram", ctx_tokens=4096, batch=3)).splitlines()[:2]
    assert first == "qwen3.8-flash-next on 3x-rtx3090, exllamav3"
    assert second == "layout vram, fp16 cache, 4,096 tokens of context, 3 sequences"


def test_in_json_every_rate_has_a_value_and_a_source_and_every_assumption_its_text() -> None:
    whole = prediction_json(asked(100_000))
    for line in whole["assumptions"]:
        key, _, text = line.partition(": ")
        assert key == "extrapolated" or ASSUMPTIONS[key] == text
    assert whole["sources"]
    for source in whole["sources"]:
        assert source["value"]
        assert source["source"] in {"measured", "published", "datasheet", "fitted"}
        assert (source["source"] == "fitted") == bool(source["fitted_on"])


def test_a_speed_has_three_figures_and_a_table_is_as_wide_as_it_needs_to_be_and_its_columns_line_up() -> None:
    for value, shown in ((1684.6, "1,685"), (100.4, "100"), (99.97, "100"), (69.0, "69.0"), (0.0123, "0.0123")):
        assert rate(Quantity(value, value, value)) == f"{shown} tok/s ({shown} to {shown})"
    wide = "x" * 150
    text = table(("a", "b", "c"), [(wide, "[red]not markup[/red]", ":smile:"), ("", "", wide)])
    assert text.count(wide) == 2
    assert "[red]not markup[/red]" in text
    assert ":smile:" in text
    assert all(line == line.rstrip() for line in text.splitlines())
    lines = table(("name", "x"), [("日本", "1"), ("e\u0301tude", "2"), ("two\nlines", "3"), ("", "4")]).splitlines()
    assert lines == [
        "  name       x",
        "  日本       1",  # each of these is two columns wide
        "  e\u0301tude      2",  # an accent of its own takes none
        "  two lines  3",
        "             4",
    ]


def test_a_drafter_when_it_pays_and_a_pool_as_its_engine_prints_it_are_shown() -> None:
    asked = {"model": "qwen3.8-27b", "kv_dtype": "fp8", "max_model_tokens": 8192}
    prediction = predict(Question(ctx_tokens=4096, speculation="mtp:3", accepted=2.5, **asked))  # type: ignore[arg-type]
    text, pool = headline(prediction), prediction.memory.kv_pool
    assert "mtp drafts 3 tokens; a step yields 2.5 of 4 (given)" in text
    told = prediction_json(prediction)["question"]["speculation"]
    assert (told["drafter"], told["tokens"], told["accepted"], told["accepted_from"]) == ("mtp", 3, 2.5, "given")
    assert f"drafting pays from {prediction.break_even:.2f} tokens a step on" in text
    assert pool is not None
    assert f"prints {pool.printed_tokens:,} tokens, {pool.concurrency:.2f} x 8,192" in text


TURBOQUANT = Question(ctx_tokens=4096, model="qwen3.8-27b", kv_dtype="turboquant_3bit_nc")


def test_rates_that_are_borrowed_are_counted_by_rung() -> None:
    assert rows(headline(predict(TURBOQUANT)))["rates"].startswith("4 measured, 3 typical of 7 kernels")


def test_a_rate_that_no_machine_has_is_said_in_place_of_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "borrowed", lambda *_: None)
    prediction = predict(TURBOQUANT)
    assert prediction.decode is None
    shown = rows(headline(prediction))
    assert shown["decode"].startswith("not predicted: machine rtx3090 has no rate for ")


@pytest.mark.parametrize(("ctx_tokens", "noted"), [(262_144, False), (262_145, True), (1 << 20, True)])
def test_a_context_beyond_the_models_own_is_noted_on_the_first_screen(ctx_tokens: int, noted: bool) -> None:
    """Whatever is asked about, the longest context here is beyond it too."""
    prediction = asked(ctx_tokens)
    (note,) = prediction.notes
    assert rows(headline(prediction))["note"] == note
    assert note.startswith(f"{ctx_tokens:,} tokens") == noted


@pytest.mark.parametrize("ctx_tokens", [1, 1 << 20, 1 << 24, MAX_TOKENS])
@pytest.mark.parametrize(
    "question", [{"layout": "vram"}, {"layout": "offload"}, {"model": "qwen3.8-27b", "hw": "rtx3090"}]
)
def test_no_memory_has_less_than_nothing_free(question: dict[str, str], ctx_tokens: int) -> None:
    """What is short is told as what is short."""
    prediction = predict(Question(ctx_tokens=ctx_tokens, **question))  # type: ignore[arg-type]
    text, plan = headline(prediction) + explain(prediction), prediction.memory
    assert re.search(r" -[\d.]", text) is None
    short = [memory.name for memory in plan.memories if memory.used_bytes(plan.pages) > memory.capacity_bytes]
    assert [line.split("  ")[1] for line in text.splitlines() if "  short  " in line] == sorted(short)


def test_a_prompt_that_the_first_step_takes_whole_has_no_prefill_and_no_wall() -> None:
    text = headline(asked(1)) + explain(asked(1))
    assert rows(text)["prefill"] == "none: the first decode step takes the whole prompt"
    assert "wall: nothing" not in text
    assert "1 token of context" in text


@pytest.mark.parametrize("layout", ["vram", "offload"])
def test_one_memory_is_one_row_one_entry_and_no_vram(layout: str) -> None:
    own = load_profile("rtx3090")
    host = replace(own.host, memory=replace(own.host.memory, value=1e12))
    gpu = replace(own.gpu, vram=replace(own.gpu.vram, value=1e12), unified_memory=True)
    prediction = predict(Question(ctx_tokens=4096, layout=layout), replace(own, gpu=gpu, host=host))
    shown = rows(headline(prediction))
    assert shown["memory"].endswith(" of 931.32 GiB")
    assert shown.keys().isdisjoint({"VRAM", "host RAM"})
    assert "(memory of gpu0 ends it)" in shown["fits"]
    memory = prediction_json(prediction)["memory"]
    assert memory["unified"]
    (entry,) = memory["devices"]
    assert entry["used_bytes"] == pytest.approx(sum(entry["parts"].values()), abs=len(entry["parts"]))
    assert {"weights", "reserved", "kv cache"} <= entry["parts"].keys()
    assert memory["cache_vram_bytes"] + memory["cache_host_bytes"] == entry["parts"]["kv cache"]
