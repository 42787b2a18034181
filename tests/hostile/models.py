"""Models that a hostile user hands to `twin`: real configurations, indexes and headers of tensors, spoilt by a seed."""

import copy
import json
import random
from pathlib import Path
from typing import Any

from tests.hostile.cases import _SPOILT, FAR, JUNK, Case, _mutated, _places, _shifted, _text
from tests.twin.models.checkpoints import CHECKPOINTS
from tests.twin.models.written import Checkpoint, size

DATA = Path(__file__).parent.parent / "data" / "models"
CONFIGS = sorted(path.stem for path in DATA.glob("*.json"))
BESIDE: dict[str, Any] = {
    "hf_quant_config.json": {
        "producer": {"name": "modelopt", "version": "0.37.0"},
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                         "exclude_modules": ["lm_head", "model.layers.0.self_attn*", "*.mlp.gate"]},
    },
    "quantize_config.json": {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True},
}  # fmt: skip
"""Files beside a configuration that says nothing of its weights."""
INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00001.safetensors"

EXTREMES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 63, 10**6, 10**9, 2**31, 2**60, 2**63, 10**30, 0.5, -0.0, 1e-300, 1e300, True, None, "", "1"),
    *([], {}, [[]], [0], ["x"], {"": 0}, "x" * 100_000, [1] * 10_000, ["full_attention"] * 10_000),
    {str(each): each for each in range(5000)},
)
QUESTIONS = (
    ("models", "./config.json"),
    ("models", "."),
    ("predict", "--hw", "h200", "--ctx", "4k", "--model", "./config.json"),
)
DEPTH = 10_000


def model_case(seed: str) -> Case:
    """A question about a configuration, or a folder with a checkpoint, of which one file is not as it should be."""
    draw = random.Random(seed)  # noqa: S311
    words = draw.choice(QUESTIONS)
    if draw.random() < 0.6:
        files = {"config.json": _config(draw)}
        if draw.random() < 0.2:
            name = draw.choice(sorted(BESIDE))
            files = {"config.json": _real("llama-3.1-8b"), name: _spoilt(copy.deepcopy(BESIDE[name]), draw)}
    else:
        files = _folder(CHECKPOINTS[draw.choice(sorted(CHECKPOINTS))], draw)
    return Case(words=(*words, *(["--json"] if draw.random() < 0.3 else [])), files=files)


def _real(name: str) -> bytes:
    return (DATA / f"{name}.json").read_bytes()


def _config(draw: random.Random) -> bytes:
    return _spoilt(json.loads(_real(draw.choice(CONFIGS))), draw)


def _spoilt(document: Any, draw: random.Random) -> bytes:
    """By its values, by its bytes, or by what no writer of JSON writes."""
    way = draw.choice(("extreme", "extreme", "extreme", "missing", "mutated", "shifted", "bytes", "nested", "renamed"))
    if way == "mutated":
        return _mutated(document, draw)
    if way == "shifted":
        return _text(_shifted(document, FAR, draw))
    if way == "bytes":
        return draw.choice(_SPOILT)(_text(document), draw)
    for _ in range(draw.choice((1, 1, 2, 4))):
        if not (places := _places(document)):
            break
        # keys above all: lists of modules are long
        holder, key = draw.choice([each for each in places if isinstance(each[0], dict)] or places)
        if way == "missing":
            del holder[key]
        elif way == "renamed" and isinstance(holder, dict):
            holder[draw.choice(JUNK).encode("utf-8", "ignore").decode()] = holder.pop(key)
        elif way == "nested":
            text = json.dumps(document | {"nested": "here"}) if isinstance(document, dict) else ""
            return text.replace('"here"', "[" * DEPTH + "]" * DEPTH).encode()
        else:
            holder[key] = copy.deepcopy(draw.choice(EXTREMES))
    return _text(document)


def _folder(kept: Checkpoint, draw: random.Random) -> dict[str, bytes]:
    """A checkpoint of one shard with its index, of which the header, the index or the configuration is spoilt."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in kept.tensors.items():
        begin, end = end, end + size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    index = {"metadata": {"total_size": end}, "weight_map": dict.fromkeys(header, SHARD)}
    files = {"config.json": _text(kept.config), INDEX: _text(index)}
    told, length = _text(header), None
    what = draw.choice(("header", "header", "length", "index", "index alone", "config", "cut"))
    if what == "header":
        told = _spoilt(_lying(header, draw) if draw.random() < 0.5 else header, draw)
    elif what == "length":
        length = draw.choice((0, 1, len(told) - 1, len(told) + 1, 2**24, 2**24 + 1, 2**32, 2**63, 2**64 - 1))
    elif what in {"index", "index alone"}:
        files[INDEX] = _spoilt(index, draw)
    elif what == "config":
        files["config.json"] = _spoilt(copy.deepcopy(kept.config), draw)
    shard = (len(told) if length is None else length).to_bytes(8, "little") + told + bytes(end)
    if what == "cut":
        shard = shard[: draw.randint(0, len(shard))]
    return files if what == "index alone" else files | {SHARD: shard}


def _lying(header: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """With one tensor that is not where it says, or not what it says."""
    entry = header[draw.choice(sorted(header))]
    begin, end = entry["data_offsets"]
    entry |= draw.choice(
        (
            {"data_offsets": [begin + 1, end + 1]}, {"data_offsets": [end, begin]}, {"data_offsets": [0, end - begin]},
            {"data_offsets": [2**52, 2**52 + end - begin]}, {"data_offsets": [begin]}, {"data_offsets": [-1, end]},
            {"shape": [2**53] * 16}, {"shape": [0]}, {"shape": [1] * 100_000}, {"shape": [-1]}, {"shape": [1.5]},
            {"dtype": "F4"}, {"dtype": "?" * 10_000}, {"dtype": 7}, {"dtype": "F64"}, {"more": 1},
        )
    )  # fmt: skip
    return header
