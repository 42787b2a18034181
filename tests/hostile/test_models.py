"""Thousands of spoilt models: each is read, or refused in a line that names its file, soon and in little memory."""

import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.flood import ended
from tests.hostile.models import CONFIGS, DATA, INDEX, SHARD, model_case
from tests.hostile.verdict import wrong_with
from tests.twin.models.checkpoints import LLAMA, PLAIN
from tests.twin.models.written import write
from twin.errors import BadFile
from twin.models.config import read_config
from twin.models.store import understand

SEED, MUTATIONS, IN_ONE_TEST, PROCESSES = 3, 2000, 250, 24
MOST_S, MOST_BYTES = 5.0, 200 * 2**20
"""Of a processor, and of memory that a whole process holds."""


@pytest.mark.parametrize("first", range(0, MUTATIONS, IN_ONE_TEST))
def test_a_spoilt_model_is_read_or_refused_by_the_name_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.chdir(tmp_path)
    came: Counter[str] = Counter()
    seen = set()
    for number in range(first, first + IN_ONE_TEST):
        case = model_case(f"{SEED}/models/{number}")
        seen.add(tuple(sorted(case.files.items())))
        for name, content in case.files.items():
            Path(name).write_bytes(content)
        begun_s = time.process_time()
        try:
            spec = understand("./config.json").spec
            assert sum(spec.weight_bytes.values()) > 0
            came["read"] += 1
        except BadFile as refused:
            said = refused.message
            assert "\n" not in said, number
            assert len(said) < 1000, number
            assert any(said.startswith(f"{name}: ") for name in (*case.files, ".")), f"{number}: {said}"
            came["refused"] += 1
        assert time.process_time() - begun_s < MOST_S, number
        for name in case.files:
            Path(name).unlink()
    assert len(seen) > 0.9 * IN_ONE_TEST
    assert min(came["read"], came["refused"]) > IN_ONE_TEST / 20


@pytest.mark.parametrize("number", range(PROCESSES))
def test_a_process_that_is_handed_a_spoilt_model_ends_as_documented(number: int) -> None:
    case = model_case(f"{SEED}/processes/{number}")
    how, took_s, _ = ended(case)
    assert wrong_with(how, case.words) == ""
    assert took_s < MOST_S


def without(key: str) -> Iterator[dict[str, Any]]:
    """Each real configuration that has the key, without it."""
    for name in CONFIGS:
        told = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        for table in (told, told.get("text_config", {})):
            if key in table:
                del table[key]
                yield told


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads"])
def test_what_a_model_cannot_do_without_is_named_where_it_is_missing(key: str) -> None:
    messages = [said for told in without(key) if (said := refusal(told))]
    assert len(messages) >= 5
    assert all(key in said for said in messages), messages


def refusal(told: dict[str, Any]) -> str:
    """Why a configuration is refused; empty where it is read."""
    try:
        read_config(told, "config.json", name="toy")
    except BadFile as wrong:
        return wrong.message
    return ""


CONTRADICTIONS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("llama-3.1-8b", {"num_key_value_heads": 5}, ("num_attention_heads", "num_key_value_heads")),
    ("llama-3.1-8b", {"num_attention_heads": 33, "num_key_value_heads": 33}, ("hidden_size", "num_attention_heads")),
    ("llama-3.1-8b", {"dtype": "float32"}, ("dtype", "torch_dtype")),
    ("gpt-oss-20b", {"num_experts_per_tok": 33}, ("num_experts_per_tok", "num_local_experts")),
    ("gpt-oss-20b", {"layer_types": ["full_attention"]}, ("layer_types", "num_hidden_layers")),
    ("deepseek-v3", {"num_experts_per_tok": 257}, ("num_experts_per_tok", "n_routed_experts")),
    ("deepseek-v3", {"first_k_dense_replace": 61}, ("first_k_dense_replace", "num_hidden_layers")),
    ("deepseek-v3", {"moe_layer_freq": 62}, ("moe_layer_freq", "num_hidden_layers")),
    ("qwen3-30b-a3b-fp8", {"decoder_sparse_step": 49}, ("decoder_sparse_step", "num_hidden_layers")),
    ("qwen3-next-80b-a3b", {"decoder_sparse_step": 49}, ("decoder_sparse_step", "num_hidden_layers")),
    ("mimo-v2-flash", {"moe_layer_freq": [0, 1]}, ("moe_layer_freq", "num_hidden_layers")),
)


@pytest.mark.parametrize(("name", "changes", "keys"), CONTRADICTIONS)
def test_fields_that_contradict_each_other_are_both_named(
    name: str, changes: dict[str, Any], keys: tuple[str, ...]
) -> None:
    told = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    with pytest.raises(BadFile) as refused:
        read_config(told | changes, "config.json", name="toy")
    assert all(key in refused.value.message for key in keys), refused.value.message


# files that no other test writes, each for a process of its own


def sparse(folder: Path, name: str) -> None:
    """A gigabyte of JSON: blanks that take no room on a disk."""
    with (folder / name).open("wb") as file:
        file.write(b'{"architectures": ["LlamaForCausalLM"]')
        file.truncate(2**30)


def dense(folder: Path, text: bytes, times: int) -> None:
    (folder / "config.json").write_bytes(b'{"architectures": ["LlamaForCausalLM"], "a": [' + text * times + b"0]}")


def header(folder: Path, text: bytes) -> None:
    (folder / SHARD).write_bytes(len(text).to_bytes(8, "little") + text)


def tensors(folder: Path, number: int, name: str) -> None:
    kept = PLAIN.tensors | {f"model.layers.0.mlp.{name}.{each}.weight": ("U8", [1]) for each in range(number)}
    write(folder / SHARD, kept)


def large(folder: Path, entries: int) -> None:
    index = {
        "weight_map": {f"model.layers.0.mlp.experts.{each}.down_proj.weight_packed": SHARD for each in range(entries)}
    }
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


FOLDERS: dict[str, Callable[[Path], None]] = {
    "a gigabyte of configuration": lambda folder: sparse(folder, "config.json"),
    "a gigabyte of index": lambda folder: sparse(folder, INDEX),
    "a gigabyte of quantisation": lambda folder: sparse(folder, "hf_quant_config.json"),
    "a gigabyte of header": lambda folder: sparse(folder, SHARD),
    "lists in a list": lambda folder: dense(folder, b"[],", 2**21),
    "tables in a list": lambda folder: dense(folder, b"{},", 2**21),
    "numbers in a list": lambda folder: dense(folder, b"1,", 2**22 - 100),
    "texts in a list": lambda folder: dense(folder, b'"ab",', 2**20),
    "a text without end": lambda folder: dense(folder, b'"' + b"x" * 2**22 + b'",', 1),
    "a text that is not Latin": lambda folder: dense(folder, b'"' + "\U0001f600".encode() * 2**20 + b'",', 1),
    "a number without end": lambda folder: dense(folder, b"9" * 2**22 + b",", 1),
    "ten thousand levels": lambda folder: dense(folder, b"[" * 10_000 + b"0" + b"]" * 10_000 + b",", 1),
    "a header of blanks": lambda folder: header(folder, b"{}" + b" " * (2**24 - 2)),
    "a header of keys": lambda folder: header(folder, b"{" + b'"a":1,' * 2_000_000 + b'"b":1}'),
    "a header of levels": lambda folder: header(folder, b'{"a":' + b"[" * 10_000_000),
    "a header of text": lambda folder: header(folder, b'{"' + "\U0001f600".encode() * 4_000_000 + b'": 1}'),
    "a header of a shape": lambda folder: header(
        folder, b'{"a":{"dtype":"F32","shape":[' + b"1," * 8_000_000 + b"1]}}"
    ),
    "a header of metadata": lambda folder: header(folder, b'{"__metadata__":{' + b'"a":"",' * 2_000_000 + b'"b":""}}'),
    "many tensors": lambda folder: tensors(folder, 100_000, "a"),
    "too many tensors": lambda folder: tensors(folder, 131_073, "a"),
    "an index of many tensors": lambda folder: large(folder, 300_000),
}


@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs to be told of its memory")
def test_enormous_files_are_read_or_refused_soon_and_in_little_memory(tmp_path: Path, case: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    FOLDERS[case](tmp_path)
    took_s, used_bytes, code, err = measured(tmp_path)
    assert took_s < MOST_S
    assert used_bytes < MOST_BYTES
    assert code in (0, 2)
    assert code == 0 or (err.count("\n") == 1 and err.startswith("twin: ") and len(err) < 1000), err


WATCHED = """
import sys, cli
try:
    cli.main(sys.argv[1:])
finally:
    with open("/proc/self/status") as status:
        print(next(line for line in status if line.startswith("VmHWM:")), file=sys.stderr)
"""
"""What `wait4` says of a child's memory begins with that of the process that started it."""


def measured(folder: Path) -> tuple[float, int, int, str]:
    """Seconds of a processor, bytes at most, exit code and what was said of the model in a folder."""
    command = [sys.executable, "-c", WATCHED, "models", "."]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        resource.prlimit(process.pid, resource.RLIMIT_AS, (2**31, 2**31))
        assert process.stderr is not None
        err, _, most = process.stderr.read().decode().rpartition("VmHWM:")
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime, 1024 * int(most.split()[0]), process.returncode, err


def test_a_billion_of_anything_is_refused_before_it_is_made() -> None:
    refused = 0
    for name in CONFIGS[::8]:
        told = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        for table in (told, told.get("text_config", {})):
            for key in [key for key, value in table.items() if type(value) is int]:
                begun_s = time.process_time()
                changed = table | {key: 10**9}
                refused += bool(refusal(changed if table is told else told | {"text_config": changed}))
                assert time.process_time() - begun_s < MOST_S, f"{name}: {key}"
    assert refused > 100
