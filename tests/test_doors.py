"""Which room may import which, what a command loads, and that every file is as small and named as the house says."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.twin.models.gguf.shapes import MODELS
from tests.twin.models.gguf.written import write

ROOT = Path(__file__).parent.parent
MOST_LINES = 500
NEVER_IN_TWIN = {"torch", "triton", "scipy"}

MAY_IMPORT: dict[str, set[str]] = {"hwprofiles": set(), "twin": {"hwprofiles"}, "realkernels": set()}
MAY_IMPORT["calibrate"] = set(MAY_IMPORT)
"""Other rooms that a room's files may import, anywhere in them."""
ROOMS = tuple(MAY_IMPORT)

BORROWING = "predict --model llama-3.1-8b --hw l4 --ctx 2k"
COMMANDS = (
    "--help", "--version", "predict --ctx 1M --layout offload", "predict --ctx 200k --layout vram --json",
    "predict --ctx 1M --explain", "compare --ctx 200k", "simulate --requests 2", "formats", BORROWING,
)  # fmt: skip
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
        if {name, name.partition(".")[0]} & {barred}:
            raise ImportError(name + " is barred")

sys.meta_path.insert(0, Barred())
import cli
cli.main(sys.argv[1:])
"""


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py")) or [ROOT / f"{room}.py"]


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


def imported_modules(node: ast.AST, modules: set[str]) -> Iterator[str]:
    """Those of the modules that a piece of source imports as it is loaded."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            named = {f"{child.module}.{alias.name}" for alias in child.names} & modules
            yield from named or {child.module or ""} & modules
        elif isinstance(child, ast.Import):
            yield from {alias.name for alias in child.names} & modules
        elif not isinstance(child, ast.FunctionDef) and not (
            isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        ):
            yield from imported_modules(child, modules)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def run(code: str, command: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", code, *command.split()]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_behind_its_doors(room: str) -> None:
    for path in sources(room):
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


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_loads_no_library_that_is_not_on_its_list(command: str) -> None:
    done = run(WATCHED_RUN, command)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split()) - {"cli", "twin", "hwprofiles", "typing_extensions", "pygments"}
    assert loaded == ({"click"} if command.startswith("--") else {"click", "msgspec", "simpy"})


@pytest.mark.parametrize("command", ["predict --ctx 1M --layout offload", BORROWING])
def test_a_prediction_needs_no_torch_numpy_scipy_or_rich(command: str) -> None:
    done = run(BARRED_RUN.replace("{barred}", repr(set(BARRED))), command)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "tok/s" in done.stdout
    assert ("carried" in done.stdout) == (command == BORROWING)


def test_an_import_that_is_barred_is_noticed() -> None:
    noticed = run(BARRED_RUN.replace("{barred}", "{'simpy'}"), "predict --ctx 1M --layout offload")
    assert "simpy is barred" in noticed.stderr


@pytest.mark.parametrize("command", ["predict --ctx 1M", "models", "models qwen3.8-27b"])
def test_no_reader_of_configurations_or_ggufs_is_loaded_where_none_is_read(command: str) -> None:
    readers = BARRED_RUN.replace("{barred}", "{'twin.models.config', 'twin.models.gguf'}")
    done = run(readers, command)
    assert (done.returncode, done.stderr) == (0, "")
    assert "twin.models.config is barred" in run(readers, "models qwen3-8b").stderr


def test_a_gguf_is_read_without_readers_of_configurations(tmp_path: Path) -> None:
    path = write(tmp_path / "small.gguf", *MODELS["llama"])
    done = run(BARRED_RUN.replace("{barred}", "{'twin.models.config'}"), f"models {path}")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_data_file_is_in_the_package() -> None:
    """A copy that is installed answers as the tree does."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for package, patterns in settings["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / package.replace(".", "/")
        packed = {path for pattern in patterns for path in folder.glob(pattern)}
        assert packed >= {path for path in folder.rglob("*.json") if "models" not in path.relative_to(folder).parts[:1]}


def test_no_circle_of_imports() -> None:
    """Of what is imported as a module is loaded: what a function or a type checker imports comes later or never."""
    paths = [path for room in ROOMS for path in sources(room)]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    graph = {name: set(imported_modules(parsed(path), set(modules))) - {name} for name, path in modules.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)


@pytest.mark.parametrize("room", [*ROOMS, "cli"])
def test_every_file_is_short_and_says_what_it_knows(room: str) -> None:
    for path in sources(room):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES, path.relative_to(ROOT)
        assert ast.get_docstring(parsed(path)), path.relative_to(ROOT)


def test_a_door_offers_what_it_names_and_nothing_else() -> None:
    import hwprofiles

    for name in hwprofiles.__all__:
        assert getattr(hwprofiles, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hwprofiles.nothing
