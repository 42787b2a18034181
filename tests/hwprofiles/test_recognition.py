"""Files taken for others are named for what they are, by their first bytes, and only where reading them has failed."""

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles import load_profile
from hwprofiles.errors import BadFile
from hwprofiles.recognition import CONFIG, HEAD_BYTES, MODEL, PROFILE, TRACE, kind_of, kind_of_head, recognised
from hwprofiles.store import shipped_document
from tests.worlds import LAWS
from twin.models import load_model
from twin.models.store import DATA as MODELS


def zipped(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, b"x")
    return content.getvalue()


def safetensors(header: dict[str, object]) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


KINDS: dict[str, tuple[bytes, str]] = {
    "gguf": (b"GGUF\x03\x00\x00\x00", "a GGUF model"),
    "safetensors": (safetensors({"w": {"dtype": "BF16", "data_offsets": [0, 2]}}), "a safetensors checkpoint"),
    "checkpoint": (zipped("archive/data.pkl"), "a PyTorch checkpoint"),
    "zip": (zipped("readme.txt"), "a zip archive"),
    "pickle": (pickle.dumps({"w": 1}, protocol=2), "a pickle, as old PyTorch checkpoints are"),
    "gzip": (gzip.compress(b"{}"), "a gzip file"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x00", "a zstd file"),
    "parquet": (b"PAR1\x15\x04", "a Parquet file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS, not the file that it stands for"),
    "page": (b"\n<!DOCTYPE html><html>", "a web page or other markup"),
    "config": (b'{\n  "architectures": [\n    "LlamaForCausalLM"\n  ],\n  "a": 4096}', "a Hugging Face config.json"),
    "config without class": (b'{"model_type": "llama", "hidden_size": 4096}', "a Hugging Face config.json"),
    "shards": (b'{"metadata": {}, "weight_map": {"a": "b"}}', "the index of a safetensors checkpoint"),
    "profile": (json.dumps(shipped_document("h200")).encode(), PROFILE),
    "model": ((MODELS / "qwen3.8-27b.json").read_bytes(), MODEL),
    "prediction": (b'{"schema": "twin.prediction/1", "fits": true}', "a prediction of twin predict"),
    "simulation": (b'{"schema": "twin.simulation/1"}', "an answer of twin simulate"),
    "mooncake": (b'{"timestamp": 0, "input_length": 5, "output_length": 1}\n', TRACE),
    "house": (b'{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1}\n', TRACE),
    "perfetto": (b'{"traceEvents": [{"name": "x"}]}', "a trace of events for Perfetto"),
    "sharegpt": (b'[\n  {"id": "a", "conversations": [{"from": "human"}]}]', "a list of ShareGPT conversations"),
    "batch": (b'{"custom_id": "1", "method": "POST", "body": {"prompt": "x"}}', "an OpenAI batch of requests"),
    "prompts": (b'{"prompt": "Hello"}\n', "a list of prompts without arrivals, as vLLM's custom data sets are"),
    "azure": (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44\n", "an Azure LLM inference trace (CSV)"),
    "burstgpt": (b"Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,G,4,1,5\n", "a BurstGPT trace (CSV)"),
    "burstgpt sessions": (
        b"\xef\xbb\xbfTimestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\r\n",
        "a BurstGPT trace (CSV)",
    ),
    "splitwise": (b"request_id,arrival_timestamp,batch_size,prompt_size,token_size\n", "a Splitwise trace (CSV)"),
    "vidur": (b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.1,5,7\n", "a Vidur trace (CSV)"),
    "csv": (b"a,b\n1,2\n", "a CSV file"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_known_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    content, known = KINDS[name]
    path = tmp_path / "file"
    path.write_bytes(content + b"\n" * 10 * HEAD_BYTES)
    assert kind_of(path) == kind_of_head(content) == known


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[]", b"3", b'"a"', b"name: mine\n", b"a,b", b"hello\nthere, you\n"]
)
def test_what_is_not_known_is_not_guessed(content: bytes) -> None:
    assert kind_of_head(content) == ""


@LAWS
@given(st.binary(max_size=300))
def test_any_bytes_are_of_a_known_kind_or_of_none(content: bytes) -> None:
    assert "\n" not in kind_of_head(content)


def test_only_regular_files_are_opened_and_little_of_a_large_one_is_read(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large.gguf"
    os.mkfifo(pipe)
    assert kind_of(pipe) == kind_of(Path("/dev/zero")) == kind_of(tmp_path / "nowhere") == ""
    assert kind_of(tmp_path) == "a folder"
    with large.open("wb") as file:
        file.write(b"GGUF")
        file.truncate(2**40)
    assert kind_of(large) == "a GGUF model"


@pytest.mark.parametrize(("load", "wanted"), [(load_model, "model"), (load_profile, "profile")])
@pytest.mark.parametrize("name", KINDS)
def test_another_file_in_place_of_a_model_or_a_profile_is_named(
    tmp_path: Path, load: Callable[[str], object], wanted: str, name: str
) -> None:
    content, known = KINDS[name]
    if name == wanted or (wanted == "model" and known == CONFIG):
        return
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(BadFile) as refused:
        load(str(path))
    assert str(refused.value) == f"{path}: {known}, not {KINDS[wanted][1]}"
    assert {"model": "twin.model/2", "profile": "twin.hardware/1"}[wanted] in refused.value.hint


def test_a_file_of_the_wanted_kind_keeps_its_own_refusal_and_one_that_can_be_read_is_never_looked_at(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    path.write_bytes(KINDS["profile"][0])
    with pytest.raises(BadFile, match="what is wrong"), recognised(path, PROFILE, instead=""):
        raise BadFile("what is wrong")
    document = json.loads(KINDS["model"][0]) | {"source": 'the "architectures": of a config.json'}
    path.write_text(json.dumps(document), encoding="utf-8")
    assert load_model(str(path)).source == document["source"]
