"""A placement is one file: it is found by its name, and no other file knows that name but rulebooks of engines."""

import ast
from pathlib import Path

import pytest

import twin
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.engines import engine_names, load_engine
from twin.errors import UnknownName
from twin.layouts import layout_names, load_layout

ROOM = Path(twin.__file__).parent
MAY_NAME = {ROOM / "layouts" / f"{name}.py" for name in layout_names()} | set((ROOM / "engines").glob("*.py"))
TIER = "vram"
"""A placement that shares its name with a memory tier, which files do speak of."""


def test_layouts_are_the_files_of_their_room() -> None:
    files = {path.stem for path in (ROOM / "layouts").glob("*.py")} - {"__init__", "layout"}
    assert set(layout_names()) == files
    assert {name: load_layout(name).name for name in files} == {name: name for name in files}
    with pytest.raises(UnknownName, match="unknown layout 'layout'"):
        load_layout("layout")


@pytest.mark.parametrize("name", [name for name in layout_names() if name != TIER])
def test_no_other_file_knows_a_layout_by_name(name: str) -> None:
    for path in set(ROOM.rglob("*.py")) - MAY_NAME:
        strings = {
            node.value for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant)
        }
        assert name not in strings, path


@pytest.mark.parametrize("name", engine_names())
def test_an_engine_keeps_its_host_formats_where_planes_lie_on_the_host(name: str) -> None:
    rules = load_engine(name)
    for layout in rules.layouts:
        kept = rules.host_formats if load_layout(layout).host_planes else rules.formats
        assert rules.formats_of(layout) == kept != ()


@pytest.mark.parametrize(("model", "default"), [("qwen3.8-27b", "vram"), ("qwen3.8-flash-next", "offload")])
def test_the_default_is_the_engines_first_that_the_model_can_be_asked_for(model: str, default: str) -> None:
    asked = Question(ctx_tokens=1, model=model, engine="twin", what_if=True)
    assert resolve(asked).layout.name == default
