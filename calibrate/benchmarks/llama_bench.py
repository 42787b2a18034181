"""`llama-bench -o json|jsonl`: one test a row, prompts (`n_prompt`) and generation (`n_gen`) after `n_depth` tokens.

Source: `tools/llama-bench/llama-bench.cpp` of github.com/ggml-org/llama.cpp at 0104b151 (fields, their types, what a
test runs), and the same before `n_depth`, `load_mode` and words for `flash_attn` came.
"""

import re
from pathlib import Path

from msgspec import Struct

from calibrate.benchmarks.points import (
    Deviation,
    Given,
    Left,
    Metric,
    Nanoseconds,
    Point,
    Read,
    Reading,
    Times,
    Tokens,
    Told,
    spread_of,
)
from hwprofiles.spelling import match
from twin.models.rewritten import weight_names
from twin.units import NS

MARKS = ("n_prompt", "n_gen", "avg_ns")
ALL_LAYERS = 99
"""What people give as `-ngl` for all of them, and the default since -1 means the same."""

_NAMED = re.compile(r"(?:IQ|TQ|Q)\d[\dA-Z_]*|BF16|F16|F32|MXFP4|NVFP4", re.IGNORECASE)
_SIZES = {"- Small": "_S", "- Medium": "_M", "- Large": "_L"}
FORMATS = {"f16": "fp16", "f32": "fp32"}
"""Cache types whose names differ here."""


class Test(Struct, frozen=True, kw_only=True):
    """A row; keys that say nothing of its time are left alone."""

    n_prompt: Tokens
    n_gen: Tokens
    avg_ns: Nanoseconds
    n_depth: Tokens = 0
    stddev_ns: Deviation = 0.0
    samples_ns: tuple[Nanoseconds, ...] = ()
    build_commit: str = ""
    gpu_info: str = ""
    model_filename: str = ""
    model_type: str = ""
    model_n_params: int = 0
    n_batch: Times = 2048
    n_ubatch: Times = 512
    type_k: str = "f16"
    type_v: str = "f16"
    n_gpu_layers: int = ALL_LAYERS
    n_cpu_moe: int = 0
    split_mode: str = "layer"
    main_gpu: int = 0
    no_kv_offload: bool = False
    flash_attn: bool | int | str = -1
    devices: str = "auto"
    tensor_split: str = ""
    tensor_buft_overrides: str = "none"


def points(row: Test, where: str, given: Given) -> Read:
    """The one time of a test. Generation of n tokens is n steps; prompts and generation in one row are timed as one."""
    del given
    if unlike := _unlike(row):
        return [Left(where, unlike)]
    n = max(1, len(row.samples_ns))
    spread = spread_of(row.avg_ns, row.stddev_ns, n)
    seconds = row.avg_ns * NS
    what = "+".join([*([f"pp{row.n_prompt}"] if row.n_prompt else []), *([f"tg{row.n_gen}"] if row.n_gen else [])])
    name = f"{where} {what}@d{row.n_depth}"
    if not row.n_prompt and not row.n_gen:
        return [Left(where, "a test of no tokens")]
    metric: Metric = "latency" if row.n_prompt and row.n_gen else "prefill" if row.n_prompt else "step"
    point = Point(
        id=name, metric=metric, seconds=seconds / row.n_gen if metric == "step" else seconds, spread=spread, n=n,
        kv_tokens=row.n_depth, prompt_tokens=row.n_prompt, steps=row.n_gen,
    )  # fmt: skip
    return [Reading(_told(row), point)]


def _unlike(row: Test) -> str:
    """Why a row says nothing of what can be asked here."""
    if not row.gpu_info and row.devices in ("auto", ""):
        return ""  # a processor's: --hw says which
    if row.main_gpu and row.split_mode == "none":
        return f"it ran on device {row.main_gpu}, not on the first"
    parts = {part for part in re.split(r"[/,;]", row.tensor_split) if part and float_of(part)}
    return f"its tensor split {row.tensor_split} is uneven" if len(parts) > 1 else ""


def float_of(text: str) -> float:
    """The number, 0 for what is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _told(row: Test) -> Told:
    return Told(
        engine="llama.cpp", version=row.build_commit, gpus=_gpus(row), model=row.model_filename, kind=row.model_type,
        parameters=row.model_n_params, weights=weights_of(row), kv_dtype=_kv_dtype(row),
        chunk_tokens=min(row.n_batch, row.n_ubatch), flags=_flags(row),
    )  # fmt: skip


def _gpus(row: Test) -> tuple[str, ...]:
    """Those that took part: `-sm none` runs on one; `-dev` names some of those that are there."""
    found = tuple(name.strip() for name in re.split(r", |/", row.gpu_info) if name.strip())
    if row.devices not in ("auto", ""):
        found = found[: len(re.split(r"[/,]", row.devices))]
    return found[:1] if row.split_mode == "none" else found


def _kv_dtype(row: Test) -> str:
    key, value = (FORMATS.get(each, each) for each in (row.type_k, row.type_v))
    return key if key == value else f"{key}/{value}"


def weights_of(row: Test) -> str:
    """What `--weights` calls them: by the file's name, else by the words at the end of the model's kind."""
    kind = row.model_type
    for words, letter in _SIZES.items():
        kind = kind.replace(f" {words}", letter)
    for text in (Path(row.model_filename).name, kind.split(" - ")[0]):
        for found in reversed(_NAMED.findall(text)):
            if (name := match(found, weight_names())) is not None:
                return name
    return ""


def _flags(row: Test) -> tuple[tuple[str, str | int], ...]:
    """Flags that move layers, experts or the cache off the devices, or that split them otherwise than by layers."""
    flags: list[tuple[str, str | int]] = []
    if 0 <= row.n_gpu_layers < ALL_LAYERS:
        flags.append(("gpu_layers", row.n_gpu_layers))
    if row.n_cpu_moe:
        flags.append(("cpu_experts", row.n_cpu_moe))
    if row.no_kv_offload:
        flags.append(("layout", "nkvo"))
    if row.split_mode == "row" and len(_gpus(row)) > 1:
        flags.append(("split", "row"))
    if str(row.flash_attn).lower() in ("0", "false", "off", "disabled"):
        flags.append(("backend", "llama.cpp_unfused"))
    if row.tensor_buft_overrides not in ("none", ""):
        flags.append(("overrides", row.tensor_buft_overrides))
    return tuple(flags)
