"""Which room may import which, what a command loads, and that every file is as small and named as the house says."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from twin.assumptions import ASSUMPTIONS
from twin.engines import engine_names, load_engine
from twin.layouts import layout_names, load_layout

ROOT = Path(__file__).parent.parent
ROOMS = ("hwprofiles", "twin", "realkernels", "calibrate")
MOST_LINES = 500

MAY_IMPORT = {
    "hwprofiles": set(),
    "twin": {"hwprofiles"},
    "realkernels": set(),
    "calibrate": {"hwprofiles", "twin", "realkernels"},
}
"""Other rooms that a room's files may import, anywhere in them."""

NEVER_IN_TWIN = {"torch", "triton", "scipy"}

ALLOWED_IMPORTS = {
    "--help": {"click"},
    "--version": {"click"},
    "predict --ctx 1M --layout offload": {"click", "msgspec", "simpy"},
    "predict --ctx 200k --layout vram --json": {"click", "msgspec", "simpy"},
    "predict --ctx 1M --explain": {"click", "msgspec", "simpy"},
    "compare --ctx 200k": {"click", "msgspec", "simpy"},
    "simulate --requests 2": {"click", "msgspec", "simpy"},
    "formats": {"click", "msgspec", "simpy"},
}
"""Third-party packages that each command loads; `typing_extensions` and the like come with them."""
COMES_ALONG = {"typing_extensions", "pygments"}

BARRED = ("torch", "triton", "numpy", "scipy", "rich", "realkernels", "calibrate")
"""What a prediction does without, down to the last byte of its answer."""

WATCHED_RUN = """
import sys
before = set(sys.modules)
import cli
try:
    cli.main(sys.argv[1:])
except SystemExit as left:
    code = left.code
sys.stdout.flush()
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - set(sys.stdlib_module_names)), file=sys.stderr)
sys.exit(code)
"""

BARRED_RUN = """
import sys

class Barred:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {barred}:
            raise ImportError(name + " is barred")

sys.meta_path.insert(0, Barred())
import cli
cli.main(sys.argv[1:])
"""


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of everything that a piece of source imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield ast.unparse(node.args[0]).lstrip("f").strip("'\"").partition(".")[0]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def run(code: str, command: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", code, *command.split()]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_behind_its_doors(room: str) -> None:
    files = sources(room)
    assert files
    for path in files:
        rooms = set(imported(parsed(path))) & {*ROOMS, "cli", "tests"}
        assert rooms <= MAY_IMPORT[room] | {room}, path.relative_to(ROOT)


def test_the_twin_never_imports_a_gpu_library_or_scipy() -> None:
    for room in ("twin", "hwprofiles"):
        for path in sources(room):
            assert not set(imported(parsed(path))) & NEVER_IN_TWIN, path.relative_to(ROOT)


def test_the_command_line_imports_calibrate_and_kernels_only_inside_functions() -> None:
    tree = parsed(ROOT / "cli.py")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and set(imported(node)) & {"calibrate", "realkernels"}:
            assert id(node) in inside, f"line {node.lineno}"


@pytest.mark.parametrize("command", ALLOWED_IMPORTS)
def test_a_command_loads_no_library_that_is_not_on_its_list(command: str) -> None:
    done = run(WATCHED_RUN, command)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split()) - {"cli", "twin", "hwprofiles"} - COMES_ALONG
    assert loaded == ALLOWED_IMPORTS[command]


def test_a_prediction_needs_no_torch_numpy_scipy_or_rich() -> None:
    done = run(BARRED_RUN.replace("{barred}", repr(set(BARRED))), "predict --ctx 1M --layout offload")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "tok/s" in done.stdout


def test_a_barred_import_would_be_noticed() -> None:
    done = run(BARRED_RUN.replace("{barred}", "{'simpy'}"), "predict --ctx 1M --layout offload")
    assert "simpy is barred" in done.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_is_short_and_says_what_it_knows(room: str) -> None:
    for path in sources(room):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES, path.relative_to(ROOT)
        assert ast.get_docstring(parsed(path)), path.relative_to(ROOT)


def test_the_command_line_is_short_and_says_what_it_knows() -> None:
    assert len((ROOT / "cli.py").read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    assert ast.get_docstring(parsed(ROOT / "cli.py"))


def test_a_door_offers_what_it_names_and_nothing_else() -> None:
    import hwprofiles

    for name in hwprofiles.__all__:
        assert getattr(hwprofiles, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hwprofiles.nothing


def test_layouts_and_engines_carry_the_name_of_their_file() -> None:
    assert {name: load_layout(name).name for name in layout_names()} == {name: name for name in layout_names()}
    assert {name: load_engine(name).name for name in engine_names()} == {name: name for name in engine_names()}


def test_engines_name_only_layouts_and_formats_that_exist() -> None:
    for name in engine_names():
        assert set(load_engine(name).layouts) <= set(layout_names())


def test_every_assumption_is_described_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    described = [key for key in ASSUMPTIONS if f"**{key}**" in text]
    assert described == list(ASSUMPTIONS)
