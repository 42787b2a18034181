"""`twin formats --hw`: from where on each format is faster than bf16, on a machine whose kernels were measured."""

import json

import msgspec
import pytest
from msgspec.structs import replace

from hwprofiles import load_profile
from tests.cli.command import ANSWERED, WRONG_INPUT, assert_one_line, run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A profile with rates of bf16, fp8 and int4 kernels, in a file."""
    known = load_profile("h200")
    keys = [f"attend_decode/twin/{name}" for name in ("bf16", "fp8", "int4_per_token_head")]
    toy = replace(known, name="toy", kernels={key: known.kernels[key] for key in keys})
    path = tmp_path_factory.mktemp("machines") / "toy.json"
    path.write_bytes(msgspec.json.encode(toy))
    return str(path)


def test_every_format_has_a_line_and_kernels_of_another_machine_are_named(capsys: Capture, measured: str) -> None:
    done = run(capsys, "formats", "--hw", measured)
    assert (done.code, done.err) == (ANSWERED, "")
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("  ")}
    assert "dequantisation" in lines["int4_per_token_head"]
    assert "VRAM bandwidth" in lines["fp8"]
    (told,) = (line for line in done.out.splitlines() if "Not measured on toy" in line)
    assert "q4_0" in told
    assert "are those of h200" in told
    assert "fp8," not in told


def test_the_same_as_json(capsys: Capture, measured: str) -> None:
    done = run(capsys, "formats", "--hw", measured, "--json")
    answer = json.loads(done.out)
    assert answer["schema"] == "twin.crossover/1"
    assert {"fp8", "int4_per_token_head"} <= {line["kv_dtype"] for line in answer["lines"]} - set(answer["carried"])
    (line,) = (line for line in answer["lines"] if line["kv_dtype"] == "fp8")
    assert [crossing["batch"] for crossing in line["crossings"]] == [1, 4, 16]
    assert 0 < line["ratio"] < 1


def test_one_format_is_asked_for_by_name(capsys: Capture, measured: str) -> None:
    done = run(capsys, "formats", "fp8", "--hw", measured, "--json")
    assert [line["kv_dtype"] for line in json.loads(done.out)["lines"]] == ["fp8"]


def test_a_format_without_a_kernel_is_refused(capsys: Capture, measured: str) -> None:
    assert_one_line(run(capsys, "formats", "exl3_k2v2", "--hw", measured), WRONG_INPUT, "no kernel for exl3_k2v2")


def test_a_machine_that_nobody_measured_is_refused_or_told_whose_kernels_these_are(capsys: Capture) -> None:
    done = run(capsys, "formats", "--hw", "rtx3090")
    if done.code == ANSWERED:
        assert "Not measured on rtx3090 (bf16, " in done.out
    else:
        assert_one_line(done, WRONG_INPUT, "no machine has a rate for attend_decode/twin/bf16")
