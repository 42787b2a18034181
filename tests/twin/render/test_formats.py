"""Formats are listed with what a token takes and who keeps it; exllamav3's many are one line among them."""

import json
from typing import Any

import pytest

from twin.engines import engine_names, load_engine
from twin.errors import UnknownName
from twin.formats import format_names, is_exl3, kv_format
from twin.render.catalogue import format_json, format_text


def lines() -> dict[str, str]:
    return {line.split("  ")[1]: line for line in format_text(None).splitlines()[1:-1]}


def rows(text: str) -> list[tuple[str, str]]:
    """The rows of one format's table, its heads left out."""
    return [(line[2:19].strip(), line[19:]) for line in text.splitlines()[3:]]


def test_every_format_has_a_line_and_those_of_exllamav3_share_one() -> None:
    others = [name for name in format_names() if not is_exl3(name)]
    assert sorted(lines()) == sorted([*others, "exl3_k2v2 to exl3_k8v8"])
    assert list(lines()) == sorted(lines())


def test_the_folded_line_spans_the_least_and_the_most_of_them() -> None:
    folded = lines()["exl3_k2v2 to exl3_k8v8"]
    sizes = [each["bytes"] for each in format_json(None) if is_exl3(each["name"])]
    assert f"{min(sizes):,} to {max(sizes):,}" in folded
    assert "2, 2 to 8, 8" in folded
    assert "2.5 to 8.5" in folded
    assert "exllamav3 (vram)" in folded


@pytest.mark.parametrize(
    ("name", "size", "bits"),
    [("bf16", "4,096", "16"), ("fp8_per_token_head", "2,080", "8.125"), ("q4_0", "1,152", "4.5")],
)
def test_bytes_are_those_of_a_token_in_a_layer_by_hand(name: str, size: str, bits: str) -> None:
    """2 x 4 x 256 elements: 2 B each; 1 B each and 8 scales of 4 B; half a byte each and 64 scales of 2 B."""
    cells = [cell.strip() for cell in lines()[name].split("  ") if cell.strip()]
    assert cells[2:4] == [size, bits]


def test_a_format_names_every_engine_and_layout_that_keeps_it_and_no_other() -> None:
    for told in format_json(None):
        kept = {(each["engine"], layout) for each in told["engines"] for layout in each["layouts"]}
        assert kept == {
            (engine, layout)
            for engine in engine_names()
            for layout in load_engine(engine).layouts
            if told["name"] in load_engine(engine).formats_of(layout)
        }


def test_what_no_engine_keeps_says_how_to_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no engine" not in lines()["fp8"]
    monkeypatch.setattr("twin.render.catalogue.engine_names", lambda: ["exllamav3"])
    assert "no engine: --what-if" in lines()["fp8"]
    assert "no engine" not in lines()["fp16"]


def test_the_least_capability_is_shown() -> None:
    assert "  8.9  " in lines()["fp8_per_token_head"]
    assert "  any  " in lines()["fp8"]


@pytest.mark.parametrize("name", format_names())
def test_one_format_is_shown_whole(name: str) -> None:
    text = format_text(name)
    assert text.startswith(f"{name}: {kv_format(name).summary}\n\n")
    shown = dict(rows(text))
    assert shown["K"].startswith(f"{kv_format(name).key.bits} bits")
    assert shown["V"].startswith(f"{kv_format(name).value.bits} bits")


def test_scales_are_named_where_they_are_kept() -> None:
    shown = dict(rows(format_text("kvarn_k4v2_g128")))
    assert shown["K"] == "4 bits, 2 B for every token and head, 4 B for every channel of 128 tokens"
    assert shown["quantised"] == "128 tokens together"
    assert dict(rows(format_text("q4_0")))["V"] == "4 bits, 2 B for every 32 elements"


def test_backends_are_named_where_an_engine_has_a_choice_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twin.render.catalogue.engine_names", lambda: ["exllamav3", "vllm"])
    assert dict(rows(format_text("fp8")))["backends"] == "vllm: flashinfer, triton"
    assert "backends" not in dict(rows(format_text("fp16")))


@pytest.mark.parametrize("name", [None, "fp8", "exl3_k2v8"])
def test_json_folds_nothing_and_holds_no_more_than_json_can(name: str | None) -> None:
    document: Any = format_json(name)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    if name is None:
        assert [each["name"] for each in document] == format_names()
    else:
        assert document["key"]["bits"] == document["key_bits"]


@pytest.mark.parametrize("shown", [format_text, format_json])
def test_an_unknown_format_is_refused(shown: Any) -> None:
    with pytest.raises(UnknownName, match="unknown KV format 'fp7'"):
        shown("fp7")
