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


def test_usual_ways_of_writing_a_name() -> None:
    known = [name for _, name in NAMES]
    written = "H200 RTX3090 3x_rtx3090 3xrtx3090 Llama-3.1-8B vLLM FP8 Q4-0 exl3k4v4"
    names = "h200 rtx3090 3x-rtx3090 3x-rtx3090 llama-3.1-8b vllm fp8 q4_0 exl3_k4v4"
    assert [match(each, known) for each in written.split()] == names.split()
    assert match("RTX 3090", known) == "rtx3090"
    assert match("A-b", ["a-b", "A-b", "ab"]) == "A-b"  # an equal name wins
    assert match("AB", ["a-b", "ab"]) == "a-b"


@pytest.mark.parametrize("name", ["", "-", "..", "llama-31-8b", "q40", "../vram", "h20"])
def test_two_numbers_never_run_together_and_nothing_is_no_name(name: str) -> None:
    assert match(name, [known for _, known in NAMES]) is None


MEANT = {
    "machine": {
        "rtx-pro": "rtx-pro-6000", "3090": "3x-rtx3090 rtx3090 rtx3090ti", "NVIDIA H200": "h200",
        "geforce-rtx-3090": "rtx3090", "a100-sxm": "a100-sxm-40gb a100-sxm-80gb", "5060": "rtx5060ti-16gb",
        "rtz3090": "rtx3090",
    },
    "format": {
        "k8v4": "exl3_k8v4 turboquant_k8v4", "turbo3": "turboquant_3bit_nc turboquant_k3v4_nc",
        "int4": "int4_g64 int4_per_token_head", "q4": "q4_0 q4_1",
    },
    "model": {
        "27b": "medgemma-27b qwen3.5-27b qwen3.8-27b qwen3.8-27b-fast qwen3.8-27b-int8-mlp",
        "llama-3.1-8b-instruct": "llama-3.1-8b", "qwen3.8-27b-fst": "qwen3.8-27b-fast",
    },
    "engine": {"vlm": "vllm", "exlama": "exllamav3"},
    "layout": {},
}  # fmt: skip
OTHERS = {
    "machine": "h800 a40 rtx2080 2080 2x-rtx3090 rtx309",
    "model": "llama-3.1-72b llama-3-8b qwen3.8-72b",
    "format": "fp17 exl3_k1v1 exl3",
    "engine": "exllamav2 tensorrt",
    "layout": "zzz",
}


@pytest.mark.parametrize("kind", MEANT)
def test_all_names_that_may_be_meant_are_suggested_and_another_number_is_another_product(kind: str) -> None:
    assert {name: " ".join(suggestions(name, KINDS[kind])) for name in MEANT[kind]} == MEANT[kind]
    assert not [name for name in OTHERS[kind].split() if suggestions(name, KINDS[kind])]


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


CARDS = (
    "h800 a40 A30-24GB l20 p100 t1000 b300 gb300 gh100 mi355x rtx2080 RTX2080 gtx1080ti rtx2080ti 1080 2x-rtx2080 m5 "
    "m5-max apple-m6 nvidia-h20 h200-nvl"
)


def test_a_card_is_known_by_its_number_and_its_nearest_is_one_or_none() -> None:
    for name in CARDS.split():
        assert is_accelerator(name), name
        assert suggestions(name, profile_names()) == [], name
    words = ("", "nothing", "rtx", "3x", "my-machine", "server7", "h", "../h100")
    assert not [name for name in words if is_accelerator(name)]
    assert (nearest("h800", profile_names()), nearest("v340l", profile_names())) == ("h200", None)


@LAWS
@given(st.text(max_size=20))
def test_any_text_is_a_known_name_or_none(text: str) -> None:
    names = KINDS["machine"]
    assert match(text, names) in {*names, None}
    assert {*suggestions(text, names)} <= {*names}
