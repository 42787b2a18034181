"""Models by their names on a hub: from the local cache, else fetched without weights and code, else one line."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.twin.models.checkpoints import LLAMA, PLAIN
from tests.twin.models.written import write
from twin.errors import BadFile
from twin.models.checkpoint import INDEX
from twin.models.config.quantisation import BESIDE
from twin.models.hub import FETCHED, cache_folder, kept_headers, snapshot
from twin.models.store import load_model, understand

TOTAL = sum(PLAIN.bytes_of(part) for part in PLAIN.parts)


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


class Hub(types.ModuleType):
    """A hub with one model, which says what it is asked for."""

    def __init__(self, *, headers: bool = True, fails: str = "", holds: tuple[str, ...] = ("config.json",)) -> None:
        super().__init__("huggingface_hub")
        self.asked: list[Any] = []
        self.fails, self.holds = fails, holds
        if headers:
            self.get_safetensors_metadata = self._headers

    def snapshot_download(self, name: str, *, allow_patterns: list[str]) -> str:
        """What the real one leaves in the cache."""
        self.asked.append(allow_patterns)
        if self.fails:
            raise ConnectionError(self.fails)
        folder = cache_folder() / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
        folder.mkdir(parents=True)
        for each in self.holds:
            (folder / each).write_text(json.dumps(LLAMA if each == "config.json" else {}), encoding="utf-8")
        return str(folder)

    def _headers(self, name: str, *, revision: str) -> Any:
        self.asked.append((name, revision))
        end, tensors = 0, {}
        for tensor, (_, shape) in PLAIN.tensors.items():
            begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            tensors[tensor] = types.SimpleNamespace(dtype="BF16", shape=shape, data_offsets=(begin, end))
        return types.SimpleNamespace(files_metadata={"model.safetensors": types.SimpleNamespace(tensors=tensors)})


def installed(monkeypatch: pytest.MonkeyPatch, hub: Hub | None) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_configurations_and_headers_are_fetched_once_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    installed(monkeypatch, hub)
    first = understand("org/toy")
    assert first.spec.name == "toy"
    assert sum(first.spec.weight_bytes.values()) == TOTAL
    assert first.origins["weight bytes"] == "headers that the hub sent"
    installed(monkeypatch, None)
    assert understand("org/toy") == first
    assert hub.asked == [FETCHED, ("org/toy", "abc")]
    assert set(FETCHED) == {"config.json", INDEX, *BESIDE}


@pytest.mark.parametrize("kept", [b"", b"[]x", b'[["a", [1], "b"]]', b"[" * 100_000, b"\xff", None])
def test_headers_that_cannot_be_had_or_read_leave_the_config(
    monkeypatch: pytest.MonkeyPatch, kept: bytes | None
) -> None:
    installed(monkeypatch, Hub(headers=kept is not None))
    spec = load_model("org/toy")
    folder = snapshot(cache_folder() / "models--org--toy")
    if kept is not None:
        assert kept_headers(folder) is not None
        (held,) = (cache_folder().parent.parent / "kv-twin").rglob("headers.json")
        held.write_bytes(kept)
    assert kept_headers(folder) is None
    assert "weight bytes" not in understand("org/toy").origins
    assert load_model("org/toy").weight_bytes == spec.weight_bytes


def test_weights_that_are_there_go_before_headers_that_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Hub())
    load_model("org/toy")
    write(snapshot(cache_folder() / "models--org--toy") / "model.safetensors", PLAIN.tensors)
    assert understand("org/toy").origins["weight bytes"] == "headers of 1 safetensors files"


CACHES: dict[str, Callable[[Path], tuple[dict[str, str], Path]]] = {
    "HF_HUB_CACHE": lambda home: ({"HF_HUB_CACHE": str(home / "a"), "HF_HOME": str(home / "b")}, home / "a"),
    "HF_HOME": lambda home: ({"HF_HOME": str(home / "b")}, home / "b" / "hub"),
    "XDG_CACHE_HOME": lambda home: ({"XDG_CACHE_HOME": str(home / "c")}, home / "c" / "huggingface" / "hub"),
    "HOME": lambda home: ({"HOME": str(home), "XDG_CACHE_HOME": ""}, home / ".cache" / "huggingface" / "hub"),
}


@pytest.mark.parametrize("named", CACHES)
def test_the_local_cache_is_where_the_environment_says(
    tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, Hub(fails="not to be asked"))
    variables, cache = CACHES[named](tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    folder = cache / "models--org--toy" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert load_model("org/toy").name == "toy"


def test_the_snapshot_is_the_one_that_main_means_else_the_newest_that_describes_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--toy"
    for number, commit in enumerate(("old", "new", "tokenizer")):
        place = folder / "snapshots" / commit
        place.mkdir(parents=True)
        if commit != "tokenizer":
            (place / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
        os.utime(place, (number, number))
    (folder / "refs").mkdir()
    for main, meant in (("old", "old"), ("new\n", "new"), ("gone", "new"), ("tokenizer", "new"), ("../..", "new")):
        (folder / "refs" / "main").write_text(main, encoding="utf-8")
        assert snapshot(folder).name == meant
    (folder / "refs" / "main").write_bytes(b"\xff")
    assert snapshot(folder).name == "new"
    for place in (folder / "snapshots").iterdir():
        (place / "config.json").unlink(missing_ok=True)
        place.rmdir()
    with pytest.raises(BadFile, match="a hub cache without a snapshot"):
        snapshot(folder)


def refused(name: str = "org/toy") -> BadFile:
    with pytest.raises(BadFile) as caught:
        load_model(name)
    assert "\n" not in caught.value.message
    return caught.value


def test_without_a_network_library_or_model_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_folder()
    installed(monkeypatch, Hub(fails="Could not connect\nand so on " + "x" * 1000))
    assert refused().message == f"org/toy: not in {cache} and cannot be fetched: Could not connect"
    installed(monkeypatch, Hub(holds=()))
    assert refused().message == "org/toy: has no config.json on the hub"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused("org/other").message == f"org/other: not in {cache}, and HF_HUB_OFFLINE forbids fetching it"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    installed(monkeypatch, None)
    assert "pip install 'kv-twin[hub]'" in refused("meta-llama/Llama-3.1-8B-Instruct").hint
    assert refused("meta-llama/Llama-3.1-8B-Instruct").hint.startswith("did you mean llama-3.1-8b? ")


FAKE = """
import pathlib
def snapshot_download(name, allow_patterns):
    folder = pathlib.Path("hub") / "models--org--toy" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(pathlib.Path("toy.json").read_text())
    return folder
"""
TRAP = "raise SystemExit('code of a model was run')"


def question(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    command = [sys.executable, "-m", "cli", "predict", "--ctx", "200", "--hw", "h200", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_whole_process_asks_the_library_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "huggingface_hub.py").write_text(FAKE, encoding="utf-8")
    (tmp_path / "toy.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    done = question(tmp_path, "--model", "org/toy", PYTHONPATH=str(tmp_path / "site"), HF_HUB_CACHE="hub")
    assert (done.returncode, done.stderr) == (0, "")
    assert "toy" in done.stdout


def test_code_that_lies_in_a_models_folder_is_neither_run_nor_opened(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    config = LLAMA | {"auto_map": {"AutoConfig": "modeling_toy.ToyConfig"}, "trust_remote_code": True}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    traps = ("modeling_toy.py", "configuration_toy.py", "__init__.py", "sitecustomize.py", "json.py", "msgspec.py",
             "pytorch_model.bin", "model.pkl", "conftest.py", "generation_config.json", "tokenizer.json")  # fmt: skip
    for name in traps:
        (folder / name).write_text(TRAP, encoding="utf-8")
    opened = tmp_path / "opened"
    watch = (
        "import sys; log = open(sys.argv.pop(1), 'w')\n"
        "sys.addaudithook(lambda event, told: print(told[0], file=log) if event == 'open' else None)\n"
        "import cli; cli.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", watch, str(opened), "predict", "--ctx", "200", "--hw", "h200", "--model", "toy/"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    read = [line for line in opened.read_text(encoding="utf-8").splitlines() if "toy" in line]
    assert [Path(line).name for line in read] == ["config.json"]
