"""What is known is listed by name; one of a kind is shown whole."""

import json

import pytest

from hwprofiles import load_profile, profile_names
from twin.cost.roofline import Roofs
from twin.errors import UnknownName
from twin.formats import format_names
from twin.layouts import layout_names
from twin.models import model_names
from twin.render.catalogue import listed

KINDS = {"profile": profile_names(), "model": model_names(), "layout": layout_names(), "format": format_names()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_as_json_names_everything(kind: str) -> None:
    assert [each["name"] for each in json.loads(listed(kind, None, as_json=True))] == KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_of_a_list_says_what_it_is(kind: str) -> None:
    heads, *lines = listed(kind, None, as_json=False).splitlines()
    assert "what it is" in heads
    for line in lines:
        assert len(line) > len(line.split()[0]) + 10


@pytest.mark.parametrize(("kind", "name"), [("profile", "h200"), ("model", "llama-3.1-8b"), ("format", "fp8")])
def test_one_is_shown_under_its_name(kind: str, name: str) -> None:
    assert listed(kind, name, as_json=False).startswith(f"{name}: ")
    assert json.loads(listed(kind, name, as_json=True))["name"] == name


@pytest.mark.parametrize("kind", ["profile", "model", "format"])
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_not_there_is_refused(kind: str, as_json: bool) -> None:
    with pytest.raises(UnknownName):
        listed(kind, "nothing", as_json=as_json)


@pytest.mark.parametrize("name", profile_names())
def test_a_machine_shows_every_rate_in_full(name: str) -> None:
    profile = load_profile(name)
    text = listed("profile", name, as_json=False)
    assert "…" not in text
    for key, rate in Roofs(profile).rates.items():
        line = next(line for line in text.splitlines() if line.startswith(f"  {key}  "))
        assert rate.source in line
        assert rate.date in line
        assert " ".join(rate.note.split()) in line


def test_a_model_shows_its_shape() -> None:
    text = listed("model", "llama-3.1-8b", as_json=False)
    assert "32 query heads, 8 KV heads x 128" in text
    assert "bf16 at 16 bits" in text
    assert "131,072 tokens" in text


def test_a_layout_names_its_engines() -> None:
    rows = {row["name"]: row["engines"] for row in json.loads(listed("layout", None, as_json=True))}
    assert rows["offload"] == ["exllamav3", "twin"]
    assert "vllm" in rows["vram"]
