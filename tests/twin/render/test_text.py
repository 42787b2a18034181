"""A headline stands alone, says what was asked and what is sure, and rounds without hiding."""

from hwprofiles import load_profile
from twin.case import Question
from twin.prediction import Prediction, predict
from twin.render.text import comparison, explain, headline, table

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


def test_a_headline_gives_every_speed_with_its_interval_and_wall() -> None:
    prediction = asked()
    shown = rows(headline(prediction))
    assert prediction.decode is not None
    assert f"{prediction.decode.tokens_per_s.value:.1f} tok/s (" in shown["decode"]
    assert prediction.decode.bound in shown["decode, continued"]
    assert "tok/s (" in shown["prefill"]
    assert " to " in shown["first token"]
    assert f"{prediction.memory.max_ctx_tokens():,} tokens" in shown["fits"]


def test_nothing_is_read_from_the_host_under_vram() -> None:
    shown = rows(headline(asked(4096, "vram")))
    assert "host reads" not in shown
    assert shown["KV cache"] == "27.75 KiB a token in VRAM, 0.00 KiB on the host"


def test_what_does_not_fit_shows_no_speed_but_a_way_out() -> None:
    shown = rows(headline(asked(layout="vram")))
    assert shown.keys().isdisjoint({"decode", "prefill", "first token"})
    assert shown["fits"].startswith("NO: needs ")
    assert "--layout offload" in shown["try"]


def test_an_explanation_adds_up() -> None:
    prediction = asked()
    text = explain(prediction)
    assert prediction.decode is not None
    for part in prediction.decode.parts:
        assert part.name in text
    for name, rate in prediction.sources.items():
        assert name in text
        assert (", ".join(rate.fitted_on) or rate.note) in text


def test_a_comparison_has_a_column_for_each_layout() -> None:
    text = comparison([asked(layout="vram"), asked()])
    lines = text.splitlines()
    assert lines[2].split() == ["vram", "offload"]
    assert [line.split()[-2:] for line in lines if line.startswith("  fits")] == [["no", "yes"]]


def test_a_table_is_as_wide_as_it_needs_to_be() -> None:
    wide = "x" * 150
    text = table(("a", "b", "c"), [(wide, "[red]not markup[/red]", ":smile:"), ("", "", wide)])
    assert text.count(wide) == 2
    assert "[red]not markup[/red]" in text
    assert ":smile:" in text
    assert all(line == line.rstrip() for line in text.splitlines())
