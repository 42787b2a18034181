"""Names: found whatever their case and separators, suggested where shortened or misspelt; digits are never guessed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles import profile_names
from hwprofiles.spelling import is_accelerator, match, nearest, plain, suggestions
from tests.worlds import LAWS
from twin.engines import backend_names, engine_names
from twin.formats import format_names
from twin.layouts import layout_names
from twin.models import model_names

KINDS = {
    "machine": profile_names(),
    "model": model_names(),
    "engine": engine_names(),
    "layout": layout_names(),
    "format": format_names(),
    "backend": backend_names(),
}
NAMES = [(kind, name) for kind, names in KINDS.items() for name in names]


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_shipped_names_differ_in_case_and_separators_alone(kind: str) -> None:
    assert len({plain(name) for name in KINDS[kind]}) == len(KINDS[kind])


@LAWS
@given(st.sampled_from(NAMES), st.data())
def test_a_name_is_found_whatever_its_case_and_separators(named: tuple[str, str], data: st.DataObject) -> None:
    kind, name = named
    separator = st.sampled_from(["-", "_", " ", "."])
    letters = [data.draw(separator) if letter in "-_." else letter for letter in name]
    written = "".join(letter.upper() if data.draw(st.booleans()) else letter for letter in letters)
    assert match(written, KINDS[kind]) == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H200", "h200"),
        ("RTX3090", "rtx3090"),
        ("RTX 3090", "rtx3090"),
        ("3x_rtx3090", "3x-rtx3090"),
        ("3xrtx3090", "3x-rtx3090"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("vLLM", "vllm"),
        ("FP8", "fp8"),
        ("Q4-0", "q4_0"),
        ("exl3k4v4", "exl3_k4v4"),
    ],
)
def test_usual_ways_of_writing_a_name(written: str, name: str) -> None:
    assert match(written, [known for _, known in NAMES]) == name


def test_an_equal_name_wins_over_one_that_is_written_otherwise() -> None:
    assert match("A-b", ["a-b", "A-b", "ab"]) == "A-b"
    assert match("AB", ["a-b", "ab"]) == "a-b"


@pytest.mark.parametrize("name", ["", "-", "..", "llama-31-8b", "q40", "../vram", "h20"])
def test_two_numbers_never_run_together_and_nothing_is_no_name(name: str) -> None:
    assert match(name, [known for _, known in NAMES]) is None


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        ("machine", "rtx", ["rtx3090"]),
        ("machine", "3090", ["3x-rtx3090", "rtx3090"]),
        ("machine", "NVIDIA H200", ["h200"]),
        ("machine", "geforce-rtx-3090", ["rtx3090"]),
        ("machine", "rtz3090", ["rtx3090"]),
        ("format", "k8v4", ["exl3_k8v4", "turboquant_k8v4"]),
        ("format", "turbo3", ["turboquant_3bit_nc", "turboquant_k3v4_nc"]),
        ("format", "int4", ["int4_per_token_head"]),
        ("format", "q4", ["q4_0"]),
        ("model", "27b", ["qwen3.8-27b", "qwen3.8-27b-fast", "qwen3.8-27b-int8-mlp"]),
        ("model", "llama-3.1-8b-instruct", ["llama-3.1-8b"]),
        ("model", "qwen3.8-27b-fst", ["qwen3.8-27b-fast"]),
        ("engine", "vlm", ["vllm"]),
        ("engine", "exlama", ["exllamav3"]),
    ],
)
def test_all_names_that_may_be_meant_are_suggested(kind: str, name: str, meant: list[str]) -> None:
    assert suggestions(name, KINDS[kind]) == meant


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("machine", "h100"),
        ("machine", "a100"),
        ("machine", "rtx5090"),
        ("machine", "4090"),
        ("machine", "2x-rtx3090"),
        ("machine", "rtx309"),
        ("model", "llama-3.1-70b"),
        ("model", "llama-3-8b"),
        ("model", "qwen3.8-72b"),
        ("format", "fp17"),
        ("format", "exl3_k1v1"),
        ("format", "exl3"),
        ("engine", "exllamav2"),
        ("engine", "llama.cpp"),
        ("layout", "zzz"),
    ],
)
def test_another_number_is_another_product(kind: str, name: str) -> None:
    assert suggestions(name, KINDS[kind]) == []


@LAWS
@given(st.sampled_from(NAMES), st.data())
def test_a_name_with_one_digit_changed_is_never_suggested(named: tuple[str, str], data: st.DataObject) -> None:
    kind, name = named
    places = [place for place, letter in enumerate(name) if letter.isdecimal()]
    if not places:
        return
    place = data.draw(st.sampled_from(places))
    digit = data.draw(st.sampled_from([each for each in "0123456789" if each != name[place]]))
    changed = f"{name[:place]}{digit}{name[place + 1 :]}"
    assert name not in suggestions(changed, KINDS[kind])


CARDS = [
    "h100",
    "a100",
    "A100-80GB",
    "l40s",
    "v100",
    "t4",
    "b200",
    "gb10",
    "gh200",
    "mi300x",
    "rtx5090",
    "RTX4090",
    "gtx1080ti",
    "rtx3090ti",
    "4090",
    "2x-rtx3090",
    "m1",
    "m4-max",
    "apple-m2",
    "nvidia-h100",
    "h200-nvl",
]


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_known_by_its_number(name: str) -> None:
    assert is_accelerator(name)
    assert suggestions(name, profile_names()) == []


@pytest.mark.parametrize("name", ["", "nothing", "rtx", "3x", "my-machine", "server7", "h", "../h100"])
def test_other_words_are_no_card(name: str) -> None:
    assert not is_accelerator(name)


def test_the_nearest_name_is_one_or_none() -> None:
    assert nearest("h100", profile_names()) == "h200"
    assert nearest("mi300x", profile_names()) is None


@LAWS
@given(st.text(max_size=20))
def test_any_text_is_a_known_name_or_none(text: str) -> None:
    names = KINDS["machine"]
    assert match(text, names) in {*names, None}
    assert {*suggestions(text, names)} <= {*names}
