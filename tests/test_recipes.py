"""What CONTRIBUTING says of adding a format is all that adding one takes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("hwprofiles", "twin", "realkernels", "calibrate")
FORMAT_FILES = {"twin/formats.py", "twin/engines/twin.py", "realkernels/codecs/ggml.py"}
WEIGHT_FILES = {"twin/models/ggml.py", "twin/models/rewritten.py"}
"""Types of weights, some of which are called as formats of a cache are."""


@pytest.mark.parametrize("name", ["q5_1", "iq4_nl"])
def test_a_format_is_named_in_the_files_of_its_recipe_alone(name: str) -> None:
    sources = [ROOT / "cli.py", *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
    naming = {path for path in sources if re.search(rf"\b{name}\b", path.read_text(encoding="utf-8"))}
    assert {path.relative_to(ROOT).as_posix() for path in naming} - WEIGHT_FILES == FORMAT_FILES


def test_the_recipes_name_files_that_are_there() -> None:
    recipes = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(path.replace("ggml", "<family>") in recipes for path in FORMAT_FILES)
    named = re.findall(r"`((?:twin|realkernels|calibrate|hwprofiles|tests)/[\w/.]+)`", recipes)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
