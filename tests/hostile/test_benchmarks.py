"""Mutated results of benchmarks: each is refused in one line with nothing written, or makes a profile that loads."""

import json
import random
from pathlib import Path

import pytest

from hwprofiles import load_profile
from tests.calibrate.benchmarks import files
from tests.hostile.cases import _SPOILT, FACTORS, FAR, Case, _mutated, _shifted
from tests.hostile.test_flood import ended
from tests.hostile.verdict import wrong_with

H200 = {"gpu_info": "NVIDIA H200", "model_filename": "Llama-3.1-8B-BF16.gguf", "model_type": "llama 8B BF16"}
GIVEN = ("--model", "llama-3.1-8b", "--engine", "vllm", "--kv-dtype", "bf16", "--weights", "bf16", "--hw", "h200")
LLAMA = [
    files.llama_row(n_prompt=512, seconds=0.014, **H200),
    files.llama_row(n_gen=128, seconds=0.7, **H200),
    files.llama_row(n_gen=128, n_depth=65536, seconds=1.0, **H200),
]
LATENCY = {"avg_latency": 1.0, "latencies": [0.9, 1.1], "percentiles": {"50": 1.0}}
DOCUMENTS = (LLAMA, LLAMA[1], files.SERVE, files.SERVE | {"max_concurrency": 4}, LATENCY)
SEED, CASES, IN_ONE_TEST = 5, 150, 25


def benchmark_case(seed: str) -> Case:
    """A calibration by a file that is not as it was written, and now and then by two."""
    draw = random.Random(seed)  # noqa: S311
    contents = {}
    for name in ("a.json", "b.json")[: draw.choice((1, 1, 1, 2))]:
        document, factors = draw.choice(DOCUMENTS), draw.choice((FACTORS, FAR, None, None))
        content = (
            _mutated(document, draw) if factors is None else json.dumps(_shifted(document, factors, draw)).encode()
        )
        contents[name] = draw.choice(_SPOILT)(content, draw) if draw.random() < 0.2 else content
    command = draw.choice((("calibrate", "-o", "me.json"), ("validate",), ("validate", "--json")))
    lengths = ("--ctx", "512", "--output-tokens", "64", "--batch", "1")
    return Case(words=(*command, *GIVEN, *lengths, "--from", *contents), files=contents)


@pytest.mark.parametrize("first", range(0, CASES, IN_ONE_TEST))
def test_hostile_benchmarks_end_in_a_documented_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(first, first + IN_ONE_TEST):
        case = benchmark_case(f"{SEED}/{number}")
        done = ended(case, tmp_path)
        assert not wrong_with(done, case.words), f"{number}: {case.words}: {wrong_with(done, case.words)}"
        assert bool(done.left) == (case.words[0] == "calibrate" and done.code == 0), f"{number}: {done}"


def test_what_is_written_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = Case(
        words=("calibrate", "-o", "../me.json", *GIVEN, "--from", "a.json"),
        files={"a.json": json.dumps(LLAMA).encode()},
    )
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    assert ended(case, tmp_path / "in").code == 0
    assert load_profile(str(tmp_path / "me.json")).name == "me"
