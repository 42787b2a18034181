"""`twin quality`: the contract, what it refuses, and how it ends without torch, without a GPU and half-way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cli
from calibrate.quality.heads import KINDS
from tests.calibrate.quality.dumped import some, whole, write
from tests.cli.command import ANSWERED, CHILD, INTERRUPTED, WRONG_INPUT, assert_one_line, run
from tests.cli.test_answers import asked, assert_holds

Capture = pytest.CaptureFixture[str]

QUICK = ("--model", "llama-3.1-8b", "--tokens", "256", "--kv-dtype", "fp8,int4_per_token_head")
FIGURES = (
    "key_relative_rms", "value_relative_rms", "score_rms", "score_max", "kl_mean", "kl_p99", "output_relative_rms",
    "output_cosine_mean", "output_cosine_min",
)  # fmt: skip
ROW: dict[str, Any] = {"kv_dtype": str, "reference": bool, "bytes_per_token": int, "tokens_in_16_bits": int}
SAMPLE = {
    "name": str, "about": str, "tokens": int, "kv_heads_measured": int, "queries": int, "queries_generated": bool,
    "attention": {"effective_tokens": float, "top_share": float, "first_share": float}, "formats": list,
}  # fmt: skip
CONTRACT = {
    "schema": str, "question": {"model": str, "heads": str, "device": str}, "made": {"device_name": str, "torch": str},
    "kv_heads": int, "head_dim": int, "samples": list, "left_out": list, "published_quality": list,
}  # fmt: skip


@pytest.fixture
def _torch() -> None:
    pytest.importorskip("torch")


def answered(capsys: Capture, *arguments: str) -> Any:
    answer = asked(capsys, "quality", *arguments)
    assert answer["schema"] == "twin.quality/1"
    return answer


@pytest.mark.usefixtures("_torch")
def test_an_answer_in_json_holds_what_is_promised(capsys: Capture) -> None:
    answer = answered(capsys, *QUICK)
    assert_holds(answer, CONTRACT)
    assert (answer["question"]["seed"], answer["question"]["tensors"], answer["pooled"]) == (0, None, None)
    assert [sample["name"] for sample in answer["samples"]] == list(KINDS)
    for sample in answer["samples"]:
        assert_holds(sample, SAMPLE)
        names = [row["kv_dtype"] for row in sample["formats"]]
        assert names == ["fp16", "absmax_int4", "fp8", "int4_per_token_head"]
        for row in sample["formats"]:
            assert_holds(row, ROW | dict.fromkeys(FIGURES, float))
            assert row["reference"] == (row["kv_dtype"] in {"fp16", "absmax_int4"})
            assert all(row[figure] >= 0 for figure in FIGURES if "cosine" not in figure)
            assert -1 <= row["output_cosine_min"] <= row["output_cosine_mean"] <= 1


@pytest.mark.usefixtures("_torch")
def test_text_says_what_was_measured_and_apart_from_it_what_is_published(capsys: Capture) -> None:
    done = run(capsys, "quality", "--tokens", "256", "--kv-dtype", "fp8,int4_per_token_head")
    assert (done.code, done.err) == (ANSWERED, "")
    measured, _, published = done.out.partition("PUBLISHED, not measured here")
    for piece in ("MEASURED here", "made-up heads in the shape of qwen3.8-27b", "absmax_int4 (reference)", "seed 0"):
        assert piece in measured
    assert "8.257" in published
    assert "8.257" not in measured
    explained = run(capsys, "quality", "--tokens", "256", "--kv-dtype", "fp8", "--explain").out
    assert all(f"\n{name}: {about}\n" in explained for name, (_, about) in KINDS.items())


@pytest.mark.usefixtures("_torch")
def test_own_tensors_are_measured_where_they_are_given(capsys: Capture, tmp_path: Path) -> None:
    path = write(tmp_path / "own.safetensors", k=some(64, 2, 64), v=some(64, 2, 64, seed=1))
    answer = answered(capsys, "--tensors", str(path), "--kv-dtype", "q8_0")
    assert answer["question"] | {"device": ""} == {
        "model": None, "tensors": str(path), "heads": "tensors", "seed": 0, "device": "",
    }  # fmt: skip
    assert (answer["kv_heads"], answer["head_dim"], answer["published_quality"]) == (2, 64, [])
    assert f"cache formats on {path} (2 KV heads of 64), seed 0" in run(capsys, "quality", "--tensors", str(path)).out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--kv-dtype fpp16", "unknown KV format 'fpp16' (did you mean fp16?"),
        ("--kv-dtype fp8,", "unknown KV format ''"),
        ("--kv-dtype absmax_int4", "unknown KV format 'absmax_int4'"),
        ("--kv-dtype exl3_k9v9", "exl3_k2v2 to exl3_k8v8"),
        ("--heads uniform", "'uniform' is not one of 'outliers', 'gaussian', 'tails', 'sinks'"),
        ("--tokens 15", "--tokens: 15 is outside the range of 16 to 131,072 tokens"),
        ("--tokens 1M", "--tokens: 1,048,576 is outside the range of 16 to 131,072 tokens"),
        ("--tokens many", "'many' is not a token count"),
        ("--seed 1.5", "not a valid integer"),
        ("--seed -1", "--seed: -1 is outside the range from 0 on"),
        ("--device tpu", "unknown device 'tpu' (known: cpu, cuda, cuda:0, cuda:1, ...)"),
        ("--tensors x --heads sinks", "--heads means nothing beside --tensors"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(capsys: Capture, given: str, says: str) -> None:
    """Whether torch is there or not."""
    assert_one_line(run(capsys, "quality", *given.split()), WRONG_INPUT, says)


def test_a_wrong_file_is_refused_in_one_line_or_one_document(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "dumped.safetensors"
    path.write_bytes(whole({"k": ("F32", some()), "v": ("F32", some())})[:-5])
    says = "tensor 'v' ends at byte 1,280"
    assert_one_line(run(capsys, "quality", "--tensors", str(path)), WRONG_INPUT, f"twin: {path}: ", says)
    done = run(capsys, "quality", "--tensors", str(path), "--json")
    assert (done.code, done.err) == (WRONG_INPUT, "")
    error = json.loads(done.out)["error"]
    assert (error["type"], says in error["message"]) == ("BadFile", True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--model qwen3.8-27b", "own: tensor 'k' has 2 heads of 4, qwen3.8-27b has 4 of 256"),
        ("--tokens 21", "--tokens: 21 is outside the range of 16 to the 20 of "),
        ("--tokens 8", "--tokens: 8 is outside the range of 16 to the 20 of "),
        ("--seed 3", "--seed means nothing where "),
        ("-o own", "--tensors and -o name one file: "),
    ],
)
def test_what_does_not_go_with_a_file_is_refused_and_leaves_it_alone(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "own", k=some(), v=some(), q=some())
    before = path.read_bytes()
    assert_one_line(run(capsys, "quality", "--tensors", "own", *given.split()), WRONG_INPUT, says)
    assert path.read_bytes() == before


def test_more_elements_than_can_be_measured_are_refused(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.quality.heads.MOST_ELEMENTS", 2**16)
    told = "K of 4,096 tokens with 2 heads of 256", "(--tokens takes fewer)"
    assert_one_line(run(capsys, "quality"), WRONG_INPUT, *told)
    path = write(tmp_path / "own", k=some(5000, 2, 8), v=some(5000, 2, 8))
    assert_one_line(run(capsys, "quality", "--tensors", str(path)), WRONG_INPUT, "K of 5,000 tokens with 2 heads of 8")


def test_without_torch_it_says_what_to_install(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert_one_line(run(capsys, "quality"), WRONG_INPUT, "torch is not installed (pip install 'kv-twin[kernels]')")


@pytest.mark.usefixtures("_torch")
def test_a_device_that_is_not_there_is_refused_in_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert_one_line(run(capsys, "quality", "--device", "cuda:1"), WRONG_INPUT, "use device cpu")


@pytest.mark.usefixtures("_torch")
def test_where_no_format_can_be_kept_the_reason_is_given(capsys: Capture, tmp_path: Path) -> None:
    path = write(tmp_path / "own", k=some(64, 1, 12), v=some(64, 1, 12))
    done = run(capsys, "quality", "--tensors", str(path), "--kv-dtype", "q8_0,exl3_k4v4")
    assert_one_line(done, WRONG_INPUT, "q8_0 needs head sizes that are multiples of 32, not 12")


@pytest.mark.usefixtures("_torch")
def test_too_little_memory_is_one_line_and_a_bug_is_not_taken_for_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [MemoryError(), RuntimeError("CUDA out of memory. Tried\n2 GiB"), RuntimeError("shapes do not match")]

    def failing(*_: Any) -> None:
        raise errors[0]

    monkeypatch.setattr("calibrate.quality.errors.kept_in", failing)
    for _ in range(2):
        assert_one_line(run(capsys, "quality", *QUICK), WRONG_INPUT, "cpu has too little memory for this", "--tokens")
        del errors[0]
    with pytest.raises(RuntimeError, match="shapes do not match"):
        cli.main(["quality", *QUICK])


@pytest.mark.usefixtures("_torch")
def test_an_interrupted_measurement_leaves_no_file(tmp_path: Path) -> None:
    arguments = [*CHILD, "quality", "--tokens", "32k", "-o", str(tmp_path / "answer")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        time.sleep(4)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (INTERRUPTED, "", "twin: interrupted\n")
    assert os.listdir(tmp_path) == []
