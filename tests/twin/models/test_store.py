"""Finding models by name and by path, and laying a file over a shipped one."""

import json
import math
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


@pytest.mark.parametrize(
    ("name", "meant"),
    [("meta-llama/Llama-3.1-8B-Instruct", "did you mean llama-3.1-8b? "), ("meta-llama/Llama-3.1-7B", "")],
)
def test_a_name_on_a_hub_that_is_not_in_its_cache_is_refused_with_what_else_is_read(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadFile) as refused:
        load_model(name)
    assert str(refused.value) == f"{name}: not in {tmp_path}, and HF_HUB_OFFLINE forbids fetching it"
    assert refused.value.hint.startswith(f"{meant}--model reads a shipped name, a config.json")
    kept = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "1"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    found = load_model(name)
    assert (found.name, found.hidden, found.layers) == (name.split("/")[1], 64, 2)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip


def test_a_config_is_read_alone_in_its_folder_and_with_its_source_around_it(tmp_path: Path) -> None:
    path, around = tmp_path / "config.json", tmp_path / "mine.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    around.write_text(json.dumps({"source": "me", "summary": "small", "config": CONFIG}), encoding="utf-8")
    alone, folder, kept = load_model(str(path)), load_model(str(tmp_path)), load_model(str(around))
    assert alone == folder
    assert (kept.name, kept.source, kept.summary) == ("mine", "me", "small")
    assert kept.parameters == alone.parameters
    for wrong, says in (({"config": CONFIG}, "missing required field `source`"), ({"config": []}, "Expected `object`")):
        around.write_text(json.dumps({"source": "", "summary": ""} | wrong if wrong["config"] == [] else wrong))
        with pytest.raises(BadFile, match=says) as refused:
            load_model(str(around))
        assert str(refused.value).startswith(f"{around}: ")


def test_a_model_that_somebody_published_can_be_extended(tmp_path: Path) -> None:
    mine = laid_over(tmp_path, extends="llama-3.1-8b", name="mine", native_ctx_tokens=8192)
    parent = load_model("llama-3.1-8b")
    assert (mine.name, mine.native_ctx_tokens) == ("mine", 8192)
    assert (mine.kinds, mine.parameters) == (parent.kinds, parent.parameters)


@pytest.mark.parametrize("nothing", ["", " "])
def test_nothing_is_no_folder(nothing: str) -> None:
    with pytest.raises(UnknownName) as refused:
        load_model(nothing)
    assert "`twin models` lists" in refused.value.hint


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


INFINITE = """{"architectures": ["LlamaForCausalLM"], "hidden_size": %s, "intermediate_size": 8, "vocab_size": 16,
"num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 64, "time_step_limit": [0.0, Infinity]}"""


def test_a_number_that_is_not_finite_is_refused_by_its_key_where_something_follows_from_it(tmp_path: Path) -> None:
    """Published files hold a bare Infinity under keys that nothing uses."""
    path = tmp_path / "config.json"
    path.write_text(INFINITE % 8, encoding="utf-8")
    assert load_model(str(path)) == load_model(str(tmp_path))
    for number in ("Infinity", "NaN", "1e999"):
        path.write_text(INFINITE % number, encoding="utf-8")
        for what in (path, tmp_path):
            with pytest.raises(BadFile, match=r"config.json: hidden_size: is (inf|nan), not a whole number"):
                load_model(str(what))


def test_a_model_file_of_our_own_holds_finite_numbers_alone(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"\$.weights.bits is inf, which is not a number that a data file may hold"):
        laid_over(tmp_path, extends="llama-3.1-8b", weights={"format": "bf16", "bits": math.inf})


def test_a_config_that_cannot_be_read_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    for name, text, wrong in (
        ("config.json", INFINITE.replace("}", ",}"), "not valid JSON: "),
        ("mine.json", '{"architectures": ["LlamaForCausalLM"], "model_type": 1, "model_type": 2}', "appears twice"),
        ("mine.json", '{"architectures": ["LamaForCausalLM"]}', "architecture 'LamaForCausalLM' is not known"),
    ):
        (tmp_path / name).write_text(text % 8 if "%" in text else text, encoding="utf-8")
        with pytest.raises(BadFile, match=wrong) as refused:
            load_model(str(tmp_path / name))
        assert "not a twin model file" not in refused.value.message


def test_a_file_beside_a_config_says_how_its_weights_are_quantised(tmp_path: Path) -> None:
    """Where config.json says it, too, that counts; a file of any other name has nothing beside it."""
    path = tmp_path / "config.json"
    path.write_text(INFINITE % 8, encoding="utf-8")
    (tmp_path / "other.json").write_text(INFINITE % 8, encoding="utf-8")
    gptq = {"bits": 4, "group_size": 4, "desc_act": False}
    (tmp_path / "quantize_config.json").write_text(json.dumps(gptq), encoding="utf-8")
    assert load_model(str(path)).weights == load_model(str(tmp_path)).weights
    assert (load_model(str(path)).weights.format, load_model(str(path)).weights.bits) == ("w4a16", 4 + 20 / 4)
    assert load_model(str(tmp_path / "other.json")).weights.format == "bf16"
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt), encoding="utf-8")
    assert load_model(str(path)).weights.format == "fp8"
    raw = json.loads(INFINITE % 8) | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 8}}
    path.write_text(json.dumps(raw), encoding="utf-8")
    assert load_model(str(path)).weights.bits == 4 + 20 / 8
