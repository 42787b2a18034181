"""Published curves, calibrated by two or three of their rows in the form of their benchmark: the others come out.

Sources: exllamav3 1.0.0 with Qwen3.6-27B at 6 bits on one RTX 3090 at 220 W, a cache of 8 bits
(turboderp-org/exllamav3#100); SGLang 0.5.15 on two RTX 3090 (mattbucci/2x-3090-GA102-300-A1-sglang-inference,
`benchmarks/*/results.json`: Qwen3.6-27B, Qwen3-Coder-30B-A3B and Qwen3.6-35B-A3B in 4 bits over an fp8 cache);
llama.cpp build 6918 on a DGX Spark (`benches/dgx-spark.md` of ggml-org/llama.cpp at 4c7e9893).
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from calibrate.benchmarks.asking import evidence
from calibrate.benchmarks.comparing import compare_points
from calibrate.benchmarks.points import Given
from calibrate.benchmarks.summary import calibrate_from
from tests.calibrate.benchmarks import files
from twin.engines import engine_names

MODELS = Path(__file__).parents[2] / "data" / "models"
WORST = 0.12
MEDIAN = 0.04


class Curve(NamedTuple):
    """Tokens a second by depth, and the depths that the calibration is given."""

    name: str
    engine: str
    given: Given
    per_s: dict[int, float]
    fitted: tuple[int, ...]
    prompt_tokens: int = 0
    """Of each row of a prompt; 0: decode steps."""


EXL3 = Given(hw="rtx3090", model="qwen3.8-27b", kv_dtype="exl3_k8v8")


def _spark(model: str, weights: str) -> Given:
    return Given(hw="gb10", kv_dtype="fp16", chunk_tokens=2048, model=model, weights=weights)


def _two(model: str, weights: str | None = "awq") -> Given:
    return Given(hw="2x-rtx3090", kv_dtype="fp8", model=model, weights=weights)


ENDS = (0, 8192, 32768)
CURVES = (
    Curve("exl3 steps", "exllamav3", EXL3, {2048: 17.12, 8192: 16.87, 32768: 15.92}, (2048, 32768)),
    Curve("exl3 prompts", "exllamav3", EXL3, {2048: 660.9, 8192: 480.8, 32768: 247.1}, (2048, 32768), 1),
    Curve("27b", "sglang", _two("qwen3.8-27b", None), {1024: 69.4, 65536: 62.3, 131072: 56.7, 261916: 47.4},
          (1024, 261916)),
    Curve("coder 30b", "sglang", _two("qwen3-30b-a3b"), {1024: 199.6, 32768: 155.0, 131072: 100.8, 261916: 68.8},
          (1024, 131072, 261916)),
    Curve("35b", "sglang", _two(str(MODELS / "qwen3.5-35b-a3b.json")), {1024: 210.5, 32768: 189.4, 261916: 122.0},
          (1024, 261916)),
    Curve("spark qwen2.5 steps", "llama.cpp", _spark(str(MODELS / "qwen2.5-7b.json"), "q8_0"),
          {0: 29.3, 4096: 28.27, 8192: 27.42, 16384: 25.93, 32768: 22.7}, ENDS),
    Curve("spark qwen2.5 prompts", "llama.cpp", _spark(str(MODELS / "qwen2.5-7b.json"), "q8_0"),
          {0: 2276.28, 4096: 2090.96, 8192: 1913.47, 16384: 1643.88, 32768: 1283.36}, ENDS, 2048),
    Curve("spark qwen3 moe steps", "llama.cpp", _spark("qwen3-30b-a3b", "q8_0"),
          {0: 60.92, 4096: 53.52, 8192: 48.58, 16384: 40.81, 32768: 30.8}, ENDS),
    Curve("spark qwen3 moe prompts", "llama.cpp", _spark("qwen3-30b-a3b", "q8_0"),
          {0: 3175.62, 4096: 2704.06, 8192: 2381.88, 16384: 1900.91, 32768: 1292.19}, ENDS, 2048),
)  # fmt: skip


def written(path: Path, curve: Curve, depths: list[int]) -> Path:
    """Rows of some depths as the engine's benchmark writes them."""
    if curve.engine == "exllamav3":
        some = {depth: curve.per_s[depth] for depth in depths}
        return files.write(path, files.printed(some, {}) if curve.prompt_tokens else files.printed({}, some))
    if curve.engine == "sglang":
        return files.write(path, [_served(depth, curve.per_s[depth]) for depth in depths])
    tokens = curve.prompt_tokens or 32
    key = "n_prompt" if curve.prompt_tokens else "n_gen"
    none = {"gpu_info": "", "model_n_params": 0, "model_filename": "", "model_type": ""}
    return files.write(path, [
        files.llama_row(n_depth=depth, seconds=tokens / curve.per_s[depth], **none | {key: tokens}) for depth in depths
    ])  # fmt: skip


def _served(depth: int, per_s: float) -> dict[str, Any]:
    ms = 1e3 / per_s
    return files.SERVING | {
        "completed": 1, "total_input_tokens": depth, "total_output_tokens": 100, "mean_ttft_ms": None,
        "median_ttft_ms": None, "mean_tpot_ms": ms, "median_tpot_ms": ms, "std_tpot_ms": 0.0,
        "server_info": {"tp_size": 2},
    }  # fmt: skip


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name.replace(" ", "-"))
def test_the_rest_of_a_published_curve_follows_from_a_few_of_its_rows(tmp_path: Path, curve: Curve) -> None:
    if curve.engine not in engine_names():
        pytest.skip(f"there is no rulebook of {curve.engine}")
    me = tmp_path / "me.json"
    calibrate_from([written(tmp_path / "a.jsonl", curve, list(curve.fitted))], curve.given, name=None, output=me)
    rest = [depth for depth in curve.per_s if depth not in curve.fitted]
    told = compare_points(evidence([written(tmp_path / "b.jsonl", curve, rest)], _on(curve.given, me)))
    errors = sorted(abs(case.error or 1.0) for case in told.cases)
    assert len(errors) == len(rest)
    assert errors[-1] < WORST
    assert errors[(len(errors) - 1) // 2] < MEDIAN


def _on(given: Given, me: Path) -> Given:
    return Given(
        hw=str(me), model=given.model, weights=given.weights, kv_dtype=given.kv_dtype, chunk_tokens=given.chunk_tokens
    )  # fmt: skip
