"""Published configurations, read as they are, against figures that nothing of this project had a part in.

`tests/data/models/` holds the files; `verbatim` of their row says whether a file is the published one byte for byte.

- `models.json`: parameters of transformers' own class, built on its meta device without buffers, and published figures.
- `caches.json`: what that class's own cache holds of each layer after a pass over three tokens on the meta device.
- `checkpoints.json`: sizes of published checkpoints.
- `packed.json`: elements of published checkpoints that hold two weights of 4 bits in one.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from twin.models import ModelSpec, load_model
from twin.models.config import read_config
from twin.models.mixers import Attention, GatedDeltaNet, KimiDelta, LatentAttention, LightningAttention, Mamba, Mamba2
from twin.render.model import CONTEXTS, cache_bytes
from twin.units import GIB

DATA = Path(__file__).parents[2] / "data"
Row = dict[str, Any]


def rows(name: str) -> list[Row]:
    found: list[Row] = json.loads((DATA / name).read_text(encoding="utf-8"))["rows"]
    return found


def name_of(row: Row) -> str:
    return str(row["name"])


MODELS, CACHES, CHECKPOINTS, PACKED = map(rows, ("models.json", "caches.json", "checkpoints.json", "packed.json"))
COUNTED = [row for row in MODELS if row["parameters"] is not None]
PUBLISHED = [row | row["published"] for row in MODELS if "published" in row]
TOTALS = [row for row in PUBLISHED if "total" in row]
ROUNDED = [row for row in PUBLISHED if "rounded" in row]
ACTIVE = [row for row in PUBLISHED if "active" in row]
CLOSE = 0.02  # of published active parameters
NEAR = 0.003  # of published sizes


@cache
def spec(name: str) -> ModelSpec:
    return load_model(str(DATA / "models" / f"{name}.json"))


def total(model: ModelSpec) -> int:
    return int(sum(model.parameters.values()))


def towers(model: ModelSpec) -> int:
    """Of images and sound."""
    return sum(count for tower, count in model.towers.items() if tower != "mtp")


def ends(model: ModelSpec) -> int:
    """Parameters of an embedding, or of a head."""
    return model.hidden * model.vocab


def rounded(text: str) -> tuple[float, float]:
    """The value of a text such as "8.03B", and half of its last digit."""
    digits, unit = text[:-1], {"M": 1e6, "B": 1e9, "T": 1e12}[text[-1]]
    return float(digits) * unit, 0.5 * unit / 10 ** len(digits.partition(".")[2])


def test_every_file_has_its_row_and_there_are_enough_of_each_sort() -> None:
    assert sorted(path.stem for path in (DATA / "models").glob("*.json")) == sorted(map(name_of, MODELS))
    assert sum(row["verbatim"] for row in MODELS) >= 60
    assert len(COUNTED) >= 140
    assert len({row["architecture"] for row in COUNTED}) >= 45
    assert len(TOTALS) >= 90
    assert len(ACTIVE) >= 15
    assert len(CACHES) >= 140
    assert len(CHECKPOINTS) >= 60


@pytest.mark.parametrize("row", COUNTED, ids=name_of)
def test_parameters_are_those_of_the_class_to_the_unit(row: Row) -> None:
    assert total(spec(row["name"])) == row["parameters"]


@pytest.mark.parametrize("row", [row for row in COUNTED if row["tower_parameters"] is not None], ids=name_of)
def test_towers_are_those_of_the_class_to_the_unit(row: Row) -> None:
    assert towers(spec(row["name"])) == row["tower_parameters"]


@pytest.mark.parametrize("row", [row for row in COUNTED if row["mtp_parameters"]], ids=name_of)
def test_layers_that_predict_are_what_the_published_total_leaves_for_them(row: Row) -> None:
    assert spec(row["name"]).towers["mtp"] == row["mtp_parameters"]


@pytest.mark.parametrize("row", TOTALS, ids=name_of)
def test_published_totals_add_up_to_the_unit(row: Row) -> None:
    """`beside` is what a checkpoint holds that is no parameter of the model, or a copy of one."""
    model = spec(row["name"])
    mtp = row["mtp_parameters"] or 0
    assert total(model) + row["tower_parameters"] + mtp + sum(row["beside"].values()) == row["total"]


@pytest.mark.parametrize("row", ROUNDED, ids=name_of)
def test_published_figures_are_ours_rounded(row: Row) -> None:
    value, half = rounded(row["rounded"])
    assert abs(total(spec(row["name"])) - value) <= half


@pytest.mark.parametrize("row", ACTIVE, ids=name_of)
def test_active_parameters_are_within_two_per_cent_of_what_is_published(row: Row) -> None:
    """`active_parameters` counts the head and not the embedding, as most makers do; some count both, or neither."""
    model = spec(row["name"])
    other = {"head": 0, "both": 0 if model.tied else ends(model), "neither": -ends(model)}[row["active_counts"]]
    assert model.active_parameters + other == pytest.approx(rounded(row["active"])[0], rel=CLOSE)


def test_most_makers_count_active_parameters_as_we_do() -> None:
    assert sum(row["active_counts"] == "head" for row in ACTIVE) >= 15


def has(model: ModelSpec, kind: str) -> bool:
    """Whether a model has a kind of layer, or a feature."""
    mixers = tuple(model.mixers)
    heads = [mixer for mixer in mixers if isinstance(mixer, Attention)]
    latent = [mixer for mixer in mixers if isinstance(mixer, LatentAttention)]
    feeds = [layer.feed_forward for layer in model.kinds.values() if layer.feed_forward is not None]
    mamba = any(isinstance(mixer, Mamba | Mamba2) for mixer in mixers)
    return {
        "heads of their own": any(each.kv_heads == each.query_heads > 1 for each in heads),
        "grouped heads": any(1 < each.kv_heads < each.query_heads for each in heads),
        "one KV head": any(each.kv_heads == 1 < each.query_heads for each in heads),
        "values of another width": any(each.value_width != each.head_dim for each in heads),
        "windows": any(each.window for each in heads) and any(not each.window for each in heads),
        "windows everywhere": bool(heads) and all(each.window for each in heads),
        "chunks": any(each.local_chunk for each in heads),
        "shared caches": any(each.shares_kv for each in heads),
        "latent": bool(latent),
        "latent without a query's rank": any(not each.query_rank for each in latent),
        "latent with an indexer": any(each.indexer for each in latent),
        "gated delta nets": any(isinstance(mixer, GatedDeltaNet) for mixer in mixers),
        "Kimi delta": any(isinstance(mixer, KimiDelta) for mixer in mixers),
        "lightning": any(isinstance(mixer, LightningAttention) for mixer in mixers),
        "Mamba hybrids": mamba and bool(heads),
        "Mamba beside attention": any(len(layer.mixers) > 1 for layer in model.kinds.values()),
        "no cache that grows": not model.caches,
        "experts": any(feed.experts > 1 for feed in feeds),
        "experts and dense layers": len({feed.experts > 1 for feed in feeds}) == 2,
        "a shared expert": any(feed.experts > 1 and feed.shared_intermediate for feed in feeds),
        "experts in a narrower space": any(feed.expert_hidden for feed in feeds),
        "layers without a half": any(not layer.mixers or not layer.feed_forward for layer in model.kinds.values()),
        "a tied head": model.tied,
        "a tower of images": "vision" in model.towers,
        "a tower of sound": "audio" in model.towers,
        "layers that predict": "mtp" in model.towers,
        "tables read by row": model.tables > 0,
        "residual streams": model.residual_streams > 1,
    }[kind]


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("heads of their own", 10), ("grouped heads", 60), ("one KV head", 4), ("values of another width", 1),
        ("windows", 15), ("windows everywhere", 1), ("chunks", 3), ("shared caches", 4), ("latent", 12),
        ("latent without a query's rank", 2), ("latent with an indexer", 4), ("gated delta nets", 6), ("Kimi delta", 1),
        ("lightning", 1), ("Mamba hybrids", 7), ("Mamba beside attention", 2), ("no cache that grows", 2),
        ("experts", 45), ("experts and dense layers", 15), ("a shared expert", 20), ("experts in a narrower space", 1),
        ("layers without a half", 4), ("a tied head", 40), ("a tower of images", 20), ("a tower of sound", 2),
        ("layers that predict", 14), ("tables read by row", 4), ("residual streams", 2),
    ],
)  # fmt: skip
def test_every_kind_of_architecture_is_among_them(kind: str, least: int) -> None:
    assert sum(has(spec(row["name"]), kind) for row in MODELS) >= least


def test_every_way_of_storing_weights_is_among_them() -> None:
    formats = {spec(row["name"]).weights.format for row in MODELS}
    assert formats >= {"bf16", "fp32", "fp8", "mxfp4", "nvfp4", "w3a16", "w4a16", "mlx", "exl2", "exl3"}


def growing(layer: list[Any], ctx_tokens: int) -> int:
    """Bytes that so many layers keep, as vLLM's cache specifications lay them out in 16 bits.

    Of a layer: elements of a token, of the indexer's key, tokens that a window sees, and elements that do not grow.
    An indexer's key has a byte an element and 4 bytes for every 128 (`v1/attention/backends/mla/indexer.py`).
    """
    count, elements, indexed, window, fixed = layer
    of_token = 2 * elements + (indexed + 4 * -(-indexed // 128))
    return int(count * (of_token * min(ctx_tokens, window or ctx_tokens) + 2 * fixed))


@pytest.mark.parametrize("row", CACHES, ids=name_of)
def test_caches_are_those_of_the_class_to_the_byte(row: Row) -> None:
    """Of a short convolution the class keeps as many inputs as it has taps, of which a next token needs all but one."""
    model = spec(row["name"])
    for ctx_tokens in (0, 1, 2, *CONTEXTS):
        assert cache_bytes(model, ctx_tokens) == sum(growing(layer, ctx_tokens) for layer in row["layers"]), ctx_tokens


VLLM: list[tuple[str, int, int]] = [
    # FullAttentionSpec: 2 x kv_heads x head_dim x 2 bytes x layers
    ("llama-3.1-8b", 8192, 32 * 8192 * 2 * 8 * 128 * 2),
    ("llama-2-7b", 8192, 32 * 8192 * 2 * 32 * 128 * 2),
    ("falcon-180b", 8192, 80 * 8192 * 2 * 8 * 64 * 2),
    ("qwen3-235b-a22b", 131072, 94 * 131072 * 2 * 4 * 128 * 2),
    # SlidingWindowSpec: 12 layers of 128 tokens beside 12 of all
    ("gpt-oss-20b", 32768, 12 * (128 + 32768) * 2 * 8 * 64 * 2),
    ("gemma-3-1b", 32768, (22 * 512 + 4 * 32768) * 2 * 1 * 256 * 2),
    # ChunkedLocalAttentionSpec: chunks of 8192
    ("llama-4-scout-fp8-dynamic", 131072, (36 * 8192 + 12 * 131072) * 2 * 8 * 128 * 2),
    # MLAAttentionSpec: kv_lora_rank + qk_rope_head_dim, once
    ("deepseek-v3", 131072, 61 * 131072 * (512 + 64) * 2),
    ("kimi-k2", 8192, 61 * 8192 * (512 + 64) * 2),
    # with 128 + 4 bytes of the indexer's key
    ("deepseek-v3.2", 131072, 61 * 131072 * ((512 + 64) * 2 + 132)),
    # MambaSpec: heads x head_dim x state and 3 inputs of the convolution, beside full attention
    ("qwen3-next-80b-a3b", 8192, 36 * 2 * (32 * 128 * 128 + 3 * 8192) + 12 * 8192 * 2 * 2 * 256 * 2),
    ("falcon-mamba-7b", 131072, 64 * 2 * (8192 * 16 + 3 * 8192)),
    ("granite-4.0-h-tiny", 8192, 36 * 2 * (48 * 64 * 128 + 3 * (3072 + 2 * 128)) + 4 * 8192 * 2 * 4 * 128 * 2),
    ("minimax-m1-80k", 8192, 70 * 2 * 64 * 128 * 128 + 10 * 8192 * 2 * 8 * 128 * 2),
]


@pytest.mark.parametrize(("name", "ctx_tokens", "expected"), VLLM, ids=[row[0] for row in VLLM])
def test_caches_are_what_an_engine_allocates_by_its_formula(name: str, ctx_tokens: int, expected: int) -> None:
    """`page_size_bytes` of vLLM's `v1/kv_cache_interface.py`, pages of one token, numbers taken from the files."""
    assert cache_bytes(spec(name), ctx_tokens) == expected


def stored(row: Row) -> ModelSpec:
    """The model as the checkpoint of a row has it: as its file says, or by the row's own table of quantisation."""
    if "quantization" not in row:
        return spec(row["config"])
    raw = json.loads((DATA / "models" / f"{row['config']}.json").read_text(encoding="utf-8"))
    for table in (raw, raw.get("text_config", {})):
        table.pop("quantization_config", None)
        table.pop("quantization", None)
    return read_config(raw | {"quantization_config": row["quantization"]}, "config.json", name="x").spec


def beside(model: ModelSpec, what: str) -> float:
    """Bytes of what a checkpoint holds beside the language model."""
    return {
        "tower": 2 * towers(model),
        "mtp": model.towers.get("mtp", 0) * model.weights.bits / 8,
        "ends of mtp": 2 * 2 * ends(model),
        "tied head": 2 * ends(model),
        "ends in 32 bits": 2 * 2 * ends(model),
    }[what]


@pytest.mark.parametrize("row", CHECKPOINTS, ids=name_of)
def test_weights_have_the_published_size_by_the_configuration_alone(row: Row) -> None:
    model = stored(row)
    size = row["bytes"] if "bytes" in row else float(row["size"].removesuffix(" GiB")) * GIB
    ours = sum(model.weight_bytes.values()) + sum(beside(model, what) for what in row.get("beside", ()))
    assert ours == pytest.approx(size, rel=NEAR)


@pytest.mark.parametrize("row", PACKED, ids=name_of)
def test_as_many_weights_are_packed_as_in_the_published_checkpoint(row: Row) -> None:
    """NVFP4 has 4.5 bits an element; the hub counts a pair as one element, and scales of 16 in some checkpoints."""
    model = stored(row)
    weights = {part: model.weights.stored(part) for part in model.parameters}
    packed = sum(
        model.parameters[part] * (16 - each.bits) / (16 - 4.5)
        for part, each in weights.items()
        if each.format == "nvfp4"
    )
    known = {
        "scales": packed / 16,
        "tower": towers(model),
        "mtp": model.towers.get("mtp", 0),
        "ends of mtp": 2 * ends(model),
    }
    elements = total(model) - packed / 2 + sum(known[what] for what in row["beside"])
    assert elements == pytest.approx(row["elements"], rel=1e-5)


def test_half_of_the_checkpoints_are_quantised() -> None:
    assert sum(stored(row).weights.bits < 16 for row in CHECKPOINTS) >= 30
