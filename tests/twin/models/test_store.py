"""Finding models by name and by path, and laying a file over a shipped one."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.twin.models.checkpoints import PLAIN
from tests.worlds import model
from twin.answers.comparison import Quality
from twin.errors import BadFile, UnknownName
from twin.models import ModelSpec, load_model, model_names
from twin.models.speculation import Accepted
from twin.models.store import published


def test_a_model_written_to_a_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_bytes(msgspec.json.encode(model(ngram=True)))
    assert load_model(str(path)) == model(ngram=True)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "llama 3.1 8b", "LLAMA_3.1_8B"])
def test_a_model_is_found_whatever_its_case_and_separators(name: str) -> None:
    assert load_model(name) is load_model("llama-3.1-8b")
    with pytest.raises(UnknownName, match="unknown model 'llama-3'"):
        load_model("llama-3")


@pytest.mark.parametrize("name", ["missing.json", "folder/missing.json", "./missing", "/qwen3.8-27b"])
def test_what_looks_like_a_path_is_read_as_one(name: str) -> None:
    with pytest.raises(BadFile, match=f"{name.removeprefix('./')}: cannot be read"):
        load_model(name)


def test_a_name_of_an_organisation_and_a_model_is_a_path_where_the_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "meta-llama/Llama-3.1-70B"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BadFile, match=rf"^{name}: no such folder, nor a model in {tmp_path}"):
        load_model(name)
    (tmp_path / name).parent.mkdir()
    with pytest.raises(BadFile, match="cannot be read: No such file or directory"):
        load_model(name)
    (tmp_path / name).mkdir()
    with pytest.raises(BadFile, match=r"a folder with neither config.json nor a GGUF") as refused:
        load_model(name)
    assert refused.value.hint.startswith("--model reads a shipped name, a config.json or its folder, a GGUF, org/name")


def test_a_config_is_read_of_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN.config), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(BadFile, match=r"model.safetensors: a header of"):
        load_model(str(tmp_path))

    def closed(_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", closed)
    assert load_model(str(tmp_path / "config.json")).layers == PLAIN.config["num_hidden_layers"]


def laid_over(folder: Path, **own: Any) -> ModelSpec:
    path = folder / "mine.json"
    path.write_text(json.dumps(own), encoding="utf-8")
    return load_model(str(path))


def test_a_file_that_extends_a_model_is_that_model_but_for_its_own_keys_which_are_complete(tmp_path: Path) -> None:
    weights = {"format": "bf16", "bits": 16}
    mine = laid_over(tmp_path, extends="qwen3.8-27b", name="mine", layers=32, weights=weights, drafters=[])
    parent = load_model("qwen3.8-27b")
    changed = {key for key in ModelSpec.__struct_fields__ if getattr(mine, key) != getattr(parent, key)}
    assert changed == {"name", "layers", "weights", "drafters"}
    assert (mine.name, mine.layers, mine.weights.parts, mine.drafters) == ("mine", 32, {}, ())
    for wrong, says in (
        ({"weights": {"format": "bf16"}}, "missing required field `bits`"),
        ({"layers": 3}, "order never comes to 'attention' within 3 layers"),
    ):
        with pytest.raises(BadFile, match=says) as refused:
            laid_over(tmp_path, extends="qwen3.8-27b", **wrong)
        assert str(refused.value).startswith(f"{tmp_path / 'mine.json'}: ")


@pytest.mark.parametrize("parent", ["qwen3.8-28b", "", "../qwen3.8-27b", "mine.json", 3, None, ["qwen3.8-27b"], {}])
def test_only_a_shipped_model_can_be_extended(tmp_path: Path, parent: Any) -> None:
    with pytest.raises(BadFile) as refused:
        laid_over(tmp_path, extends=parent, name="mine")
    assert str(refused.value) == f"{tmp_path / 'mine.json'}: extends {parent!r}, which is not a shipped model"
    assert refused.value.hint == ", ".join(model_names())


def test_a_shipped_model_cannot_extend_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ring.json").write_text('{"extends": "ring", "name": "ring"}', encoding="utf-8")
    monkeypatch.setattr("twin.models.store.DATA", tmp_path)
    with pytest.raises(BadFile, match="extends 'ring', which extends itself"):
        load_model("ring")


ACCEPTED: dict[str, Any] = dict.fromkeys(("task", "source"), "me") | {
    "drafter": "mtp", "tokens": 3, "kv_dtype": "fp8", "ctx_tokens": 1, "accepted": 2.5,
}  # fmt: skip
SEEN: dict[str, Any] = {"kv_dtype": "fp8", "metric": "needle", "value": 1.0, "conditions": "", "source": ""}
KINDS: list[tuple[type[Accepted | Quality], dict[str, Any]]] = [(Accepted, ACCEPTED), (Quality, SEEN)]


@pytest.mark.parametrize(("kind", "row"), KINDS)
def test_what_is_published_of_a_family_is_read_back(tmp_path: Path, kind: Any, row: dict[str, Any]) -> None:
    (tmp_path / "mine.json").write_text(json.dumps([row]), encoding="utf-8")
    assert [msgspec.structs.asdict(each) for each in published(tmp_path, "mine", kind)] == [row]
    for nothing in ("others", "", "../mine", str(tmp_path / "mine")):
        assert published(tmp_path, nothing, kind) == ()


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        (Quality, {}, "Expected `array`"),
        (Quality, [SEEN | {"metric": "taste"}], "$[0].metric"),
        (Quality, [SEEN | {"value": -1}], "$[0].value"),
        (Accepted, [ACCEPTED | {"tokens": 0}], "$[0].tokens"),
        (Accepted, [ACCEPTED | {"accepted": 65.5}], "$[0].accepted"),
        (Accepted, [ACCEPTED | {"model": "mine"}], "unknown field `model`"),
    ],
)
def test_a_published_file_that_says_something_else_is_refused_by_its_key(
    tmp_path: Path, kind: Any, rows: Any, message: str
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(rows), encoding="utf-8")
    with pytest.raises(BadFile) as refused:
        published(tmp_path, "mine", kind)
    assert str(refused.value).startswith(f"{tmp_path / 'mine.json'}: ")
    assert message in str(refused.value)
