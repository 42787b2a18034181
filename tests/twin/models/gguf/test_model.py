"""Models of many architectures: their mixers, their weights to the byte, and what is refused."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from msgspec.structs import replace

from tests.twin.models.gguf.shapes import DENSE, HEADS, KV, LATENT, MODELS, MOE, NORMS, D, H, Model, V, bias, f32, of
from tests.twin.models.gguf.shapes import attention as attention_of
from tests.twin.models.gguf.shapes import model as small
from tests.twin.models.gguf.written import Tensors, write
from twin.errors import BadFile
from twin.models import ModelSpec, load_model
from twin.models.fields import Understood
from twin.models.gguf import read_gguf
from twin.models.mixers import (
    Attention,
    GatedDeltaNet,
    Indexer,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    ShortConvolution,
)
from twin.models.spec import FeedForward, NgramTable


def understood(folder: Path, model: Model) -> Understood:
    return read_gguf(write(folder / "model.gguf", model.metadata, model.tensors))


def spec_of(folder: Path, model: Model) -> ModelSpec:
    return understood(folder, model).spec


def in_towers(name: str, layers: int) -> bool:
    """Whether a tensor is beside the language model."""
    return name.startswith(("v.", "mm.", "a.")) or (name.startswith("blk.") and int(name.split(".")[1]) >= layers)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_table_to_the_byte(name: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MODELS[name])
    table = list(GGUFReader(tmp_path / "model.gguf").tensors)
    if spec.ngram is not None:
        (ngrams,) = [each for each in table if each.name == "per_layer_token_embd.weight"]
        assert spec.ngram.table_bytes == int(ngrams.n_bytes)
        table.remove(ngrams)
    beside = [each for each in table if in_towers(each.name, spec.layers)]
    own = [each for each in table if not in_towers(each.name, spec.layers)]
    set_not_learned = ("exp_probs_b.bias", "layer_output_scale.weight")
    assert sum(spec.parameters.values()) == sum(
        int(each.n_elements) for each in own if not each.name.endswith(set_not_learned)
    )
    assert sum(spec.towers.values()) == sum(int(each.n_elements) for each in beside)
    assert sum(spec.weights.part_bytes.values()) == sum(int(each.n_bytes) for each in own)
    assert sum(spec.weight_bytes.values()) == pytest.approx(sum(int(each.n_bytes) for each in own), rel=1e-12)
    experts = [each for each in own if "_exps.weight" in each.name or each.name.split(".")[-2].isdigit()]
    for part, tensors in {
        "embedding": [each for each in own if each.name.startswith(("token_embd.", "per_layer_token", "position_"))],
        "head": [each for each in own if each.name == "output.weight"],
        "experts": [each for each in experts if ".ffn_" in each.name],
        "router": [each for each in own if each.name.endswith("ffn_gate_inp.weight")],
    }.items():
        held = dict[str, int](spec.weights.part_bytes)
        assert held.get(part, 0) == sum(int(each.n_bytes) for each in tensors), part


def test_a_large_llama_is_the_one_that_is_shipped(tmp_path: Path) -> None:
    shipped = load_model("llama-3.1-8b")
    hidden, width = 4096, 14336
    layer: Tensors = of(attn_norm=(hidden,), ffn_norm=(hidden,), attn_q=(hidden, 4096), attn_k=(hidden, 1024))
    layer |= of(attn_v=(hidden, 1024), attn_output=(4096, hidden), ffn_gate=(hidden, width), ffn_up=(hidden, width))
    metadata, tensors = small("llama", [layer | of(ffn_down=(width, hidden))] * 32, kind="bf16")
    metadata |= {".embedding_length": hidden, ".context_length": 131072}
    metadata |= {".attention.head_count": 32, ".attention.head_count_kv": 8}
    tensors |= dict.fromkeys(("token_embd.weight", "output.weight"), ((hidden, 128256), "bf16"))
    spec = spec_of(tmp_path, Model(metadata, tensors | {"output_norm.weight": ((hidden,), "f32")}))
    assert spec.parameters == shipped.parameters
    assert (spec.hidden, spec.vocab, spec.native_ctx_tokens) == (shipped.hidden, shipped.vocab, 131072)
    assert [mixer.kv_elements for mixer in spec.caches] == [mixer.kv_elements for mixer in shipped.caches]


GATED = Attention(query_heads=HEADS, kv_heads=KV, head_dim=D, output_gate=True)
PLAIN = Attention(query_heads=HEADS, kv_heads=KV, head_dim=D)
FAR = Attention(query_heads=HEADS, kv_heads=KV, head_dim=64)
LATENT_MIXER = LatentAttention(
    query_heads=HEADS, kv_rank=256, rope_dim=32, nope_dim=32, value_dim=32, query_rank=512
)  # fmt: skip
MIXERS: dict[str, list[Mixer]] = {
    "llama": [PLAIN] * 3,
    "qwen3": [FAR] * 2,
    "gemma2": [Attention(query_heads=HEADS, kv_heads=KV, head_dim=D, window=4096), PLAIN] * 2,
    "gpt-oss": [Attention(query_heads=HEADS, kv_heads=KV, head_dim=64, window=128), FAR] * 2,
    "llama4": ([Attention(query_heads=HEADS, kv_heads=KV, head_dim=D, local_chunk=8192)] * 3 + [PLAIN]) * 2,
    "gemma4": [
        *([Attention(query_heads=HEADS, kv_heads=KV, head_dim=D, window=512)] * 2),
        Attention(query_heads=HEADS, kv_heads=1, head_dim=64, values_from_keys=True),
        Attention(query_heads=HEADS, kv_heads=KV, head_dim=D, window=512, shares_kv=True),
    ],
    "mimo2": [
        Attention(query_heads=HEADS, kv_heads=KV, head_dim=64, value_dim=32),
        Attention(query_heads=HEADS, kv_heads=4, head_dim=64, value_dim=32, window=64),
    ],
    "afmoe": [Attention(query_heads=HEADS, kv_heads=KV, head_dim=D, output_gate=True, window=64)] * 3 + [GATED],
    "phi3": [PLAIN] * 2,
    "deepseek2": [LATENT_MIXER] * 3,
    "qwen4exp": [GatedDeltaNet(key_heads=4, value_heads=8, head_dim=32, conv_kernel=4)] * 3
    + [replace(GATED, indexer=Indexer(query_heads=4, head_dim=128, budget=64, ratio=4))],
    "falcon-h1": [Mamba2(heads=8, head_dim=64, groups=2, state=16, conv_kernel=4), PLAIN] * 2,
    "nemotron_h": [Mamba2(heads=8, head_dim=64, groups=2, state=16, conv_kernel=4)] * 2 + [PLAIN],
    "mamba": [Mamba(inner=512, state=16, conv_kernel=4, time_rank=16)] * 2,
    "jamba": [Mamba(inner=512, state=16, conv_kernel=4, time_rank=16), PLAIN],
    "qwen3next": [GatedDeltaNet(key_heads=4, value_heads=8, head_dim=32, conv_kernel=4)] * 3 + [GATED],
    "kimi-linear": [KimiDelta(heads=HEADS, head_dim=D, conv_kernel=4), LATENT_MIXER],
    "lfm2": [ShortConvolution(channels=H, conv_kernel=3)] * 2 + [PLAIN],
    "minimax-01": [LightningAttention(heads=HEADS, head_dim=D), PLAIN],
    "deci": [PLAIN, Attention(query_heads=HEADS, kv_heads=4, head_dim=D)],
}
"""Mixers in the order of layers, without their vectors."""


def bare(mixer: Mixer) -> Mixer:
    return type(mixer)(**{  # type: ignore[return-value]
        key: getattr(mixer, key) for key in mixer.__struct_fields__ if key not in ("vectors", "other_matrices")
    })  # fmt: skip


@pytest.mark.parametrize("name", MIXERS)
def test_layers_have_the_mixers_that_their_tensors_are_of(name: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MODELS[name])
    assert [bare(mixer) for kind in spec.layer_kinds for mixer in spec.kinds[kind].mixers] == MIXERS[name]
    others = {mixer.other_matrices for mixer in spec.mixers}
    assert others == {0}


def test_matrices_that_the_shape_does_not_imply_are_counted(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MODELS["step35"])
    assert {mixer.other_matrices for mixer in spec.mixers} == {H * HEADS}  # a gate for each head
    spec = spec_of(tmp_path, MODELS["gemma3n"])
    own = [kind.feed_forward.other_matrices for kind in spec.kinds.values() if kind.feed_forward]
    in_layer = 4 * H * 256 + 4 * 4 + 4 * 16 + 4 * H
    before, after = 22 * 256 * H + 3 * H * H, 3 * H * H
    assert set(own) == {in_layer, in_layer + before, in_layer + after}
    assert spec.tables == 22 * 256 * V
    assert sum(spec.caches.values()) == 20  # the last two layers read the caches of others


def test_layers_without_an_indexer_attend_to_what_the_last_one_chose(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MODELS["glm-dsa"])
    chosen = [mixer.indexer for kind in spec.layer_kinds for mixer in spec.kinds[kind].attending]
    own = Indexer(query_heads=4, head_dim=128, budget=64, ratio=1, weighted=True)
    assert [(each, each and each.shared) for each in chosen[:1]] == [(own, False)]
    assert [each and each.shared for each in chosen] == [False, True] * 2


def test_a_table_of_ngrams_streams_and_pooled_keys(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MODELS["qwen4exp"])
    assert spec.ngram == NgramTable(table_bytes=5000 * 22, row_bytes=22, rows_per_token=8, before_layer=1)
    assert spec.residual_streams == 4
    assert spec.indexer == Indexer(query_heads=4, head_dim=128, budget=64, ratio=4)
    own = [
        kind.feed_forward.other_matrices for kind in map(spec.kinds.__getitem__, spec.layer_kinds) if kind.feed_forward
    ]
    mixing = 2 * 4 * H * 256
    plain = 2 * (mixing + 4 * H * 4)
    assert own == [plain, plain + 4 * H * H + H * H + 4 * 4 * H, plain, plain + mixing]


FEEDS: dict[str, list[FeedForward | None]] = {
    "llama": [FeedForward(intermediate=512)] * 3,
    "phi3": [FeedForward(intermediate=512)] * 2,
    "nemotron_h": [None, FeedForward(intermediate=512, gated=False), None, None],
    "mamba": [None, None],
    "qwen3moe": [FeedForward(intermediate=256, experts=8, active=2)] * 2,
    "gpt-oss": [FeedForward(intermediate=256, experts=8, active=2, vectors=8, expert_vectors=2 * 256 + H)] * 4,
    "deepseek2": [FeedForward(intermediate=512)]
    + [FeedForward(intermediate=256, experts=8, active=2, shared_intermediate=512)] * 2,
    "mixtral of old": [FeedForward(intermediate=512, experts=4, active=2)] * 2,
    "deci": [FeedForward(intermediate=512)] * 2 + [FeedForward(intermediate=256)],
}


@pytest.mark.parametrize("name", FEEDS)
def test_feed_forwards_are_as_wide_as_their_tensors(name: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MODELS[name])
    assert [spec.kinds[kind].feed_forward for kind in spec.layer_kinds] == FEEDS[name]


def test_gate_and_up_of_experts_may_be_one_and_experts_may_work_on_less(tmp_path: Path) -> None:
    together = of(ffn_gate_up_exps=(H, 512, 8), ffn_down_exps=(256, H, 8)) | f32(ffn_gate_inp=(H, 8))
    keys = {".expert_count": 8, ".expert_used_count": [2, 4]}
    spec = spec_of(tmp_path, small("llama", [NORMS | attention_of() | together] * 2, keys=keys))
    feeds = [spec.kinds[kind].feed_forward for kind in spec.layer_kinds]
    assert feeds == [FeedForward(intermediate=256, experts=8, active=active) for active in (2, 4)]
    narrow = of(ffn_up_exps=(128, 256, 8), ffn_down_exps=(256, 128, 8), ffn_latent_down=(H, 128))
    narrow |= of(ffn_latent_up=(128, H), ffn_up_shexp=(H, 256), ffn_down_shexp=(256, H)) | f32(ffn_gate_inp=(H, 8))
    keys = {".expert_count": 8, ".expert_used_count": 2}
    spec = spec_of(tmp_path, small("llama", [NORMS | attention_of() | narrow], kind="q8_0", keys=keys))
    (kind,) = spec.kinds.values()
    assert kind.feed_forward == FeedForward(
        intermediate=256, experts=8, active=2, expert_hidden=128, gated=False, shared_intermediate=256,
        other_matrices=2 * H * 128,
    )  # fmt: skip


def test_the_format_is_the_type_of_most_of_the_layers_bytes(tmp_path: Path) -> None:
    tensors: Tensors = dict(MODELS["llama"].tensors)
    for layer in range(3):
        tensors[f"blk.{layer}.attn_v.weight"] = ((H, KV * D), "q6_k")
        tensors[f"blk.{layer}.ffn_down.weight"] = ((512, H), "q6_k" if layer else "q4_k")
    weights = spec_of(tmp_path, Model(MODELS["llama"].metadata, tensors)).weights
    assert (weights.format, weights.bits) == ("q4_k", 4.5)
    assert {part: stored.format for part, stored in weights.parts.items()} == {
        "embedding": "q6_k", "head": "q8_0", "vectors": "f32",
    }  # fmt: skip


def test_names_order_and_what_was_read(tmp_path: Path) -> None:
    model = understood(tmp_path, MODELS["gemma3"])
    assert model.spec.name == "small gemma3"
    assert model.spec.order == (("sliding", 5), ("full", 1))
    assert model.spec.tied
    assert model.origins["gemma3.attention.sliding_window"] == "512"
    assert model.origins["general.architecture"] == "'gemma3'"
    assert model.ignored == ("gemma3.rope.freq_base", "tokenizer.*")
    strange = MODELS["llama"].metadata | {".a\nb": 1, "other\x1b.key": 2}
    assert understood(tmp_path, Model(strange, MODELS["llama"].tensors)).ignored == (
        "'llama.a\\nb'", "'other\\x1b.*'", "llama.rope.freq_base", "tokenizer.*",
    )  # fmt: skip
    unnamed = {key: told for key, told in MODELS["llama"].metadata.items() if key != "general.name"}
    assert spec_of(tmp_path, Model(unnamed, MODELS["llama"].tensors)).name == "model"
    unnamed["general.name"] = "two\nlines"
    assert spec_of(tmp_path, Model(unnamed, MODELS["llama"].tensors)).name == "model"


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    assert spec_of(tmp_path, MODELS["llama"]).layers == 3
    assert spec_of(tmp_path, MODELS["qwen3moe"]).layers == 2


Change = Callable[[dict[str, Any], Tensors], object]


def without(*names: str) -> Change:
    return lambda metadata, tensors: [metadata.pop(name, None) or tensors.pop(name) for name in names]


def told(**keys: Any) -> Change:
    return lambda metadata, _: metadata.update({f".{key}": value for key, value in keys.items()})


def held(name: str, *dims: int, kind: str = "f32") -> Change:
    return lambda _, tensors: tensors.update({name: (dims, kind)})


REFUSED: list[tuple[str, Change, str]] = [
    ("llama", without(".context_length"), "llama.context_length is missing"),
    ("llama", without(".block_count"), "llama.block_count is missing"),
    ("llama", told(block_count=2), "tensor 'blk.2.attn_q.weight' lies in layer 2, and block_count is 2"),
    ("llama", told(block_count=4), "no tensor of layer 3 (blk.3.*) of 4 layers"),
    ("llama", told(block_count=5000), "llama.block_count: is 5000, outside the range of 1 to 4,096"),
    ("llama", told(block_count="3"), "llama.block_count: is '3', not a whole number"),
    ("llama", told(embedding_length=512), "llama.embedding_length: is 512, token_embd.weight has 256"),
    ("llama", without("token_embd.weight"), "tensor token_embd.weight is missing: no language model of one file"),
    ("llama", held("output.weight", H, 2 * V), "output.weight is [256, 2048], token_embd.weight [256, 1024]"),
    ("llama", without(".attention.head_count"), "llama.attention.head_count is missing"),
    ("llama", told(**{"attention.head_count": [8, 8]}), "attention.head_count: has 2 numbers, none for layer 2"),
    ("llama", told(**{"attention.head_count": [8, 0, 8]}), "attention.head_count: is 0 for layer 1, less than 1"),
    ("llama", told(**{"attention.head_count_kv": 4}), "blk.0.attn_k yields 64 elements; 8 query heads and 4 kv heads"),
    ("llama", told(**{"attention.head_count_kv": 3}), "llama: 8 query heads are not a multiple of 3 kv heads"),
    ("llama", told(**{"attention.key_length": 64}), "blk.0.attn_q yields 256 elements; 8 query heads and 2 kv heads"),
    ("llama", told(**{"attention.causal": False}), "attention.causal: is false: a model that does not write"),
    ("llama", told(num_loops=2), "llama.num_loops: is 2: layers that run more than once are not known"),
    ("llama", without("blk.1.attn_k.weight"), "blk.1.attn_k is missing, and attention.shared_kv_layers does not say"),
    ("llama", without("blk.1.attn_output.weight"), "blk.1.* (attn_k, attn_q, attn_v) have 98,304 elements, fewer than"),
    ("llama", without("blk.1.ffn_down.weight"), "blk.1.ffn_down is missing, beside ffn_gate, ffn_up"),
    ("llama", without("blk.1.ffn_up.weight"), "blk.1.* (ffn_down, ffn_gate) have 262,144 elements, fewer than"),
    ("llama", held("blk.1.time_mix_w1.weight", H, H), "blk.1.time_mix_w1: of a kind that is not known"),
    ("llama", held("blk.1.two\nlines.weight", H, H), "tensor 'blk.1.two\\nlines.weight' is of a kind that is not"),
    ("llama", held("enc.blk.0.attn_q.weight", H, H), "tensor 'enc.blk.0.attn_q.weight' is of a kind that is not known"),
    ("llama", held("blk.0.ssm_x.weight", H, H), "blk.0.ssm_x is of a recurrence that is not known"),
    ("qwen3moe", told(expert_count=4), "blk.0.ffn_down_exps is of 8 experts, not of expert_count 4"),
    ("qwen3moe", without(".expert_used_count"), "qwen3moe.expert_used_count is missing"),
    ("qwen3moe", told(expert_used_count=9), "qwen3moe: active 9 is more than experts 8"),
    ("qwen3moe", without("blk.0.ffn_gate_inp.weight"), "blk.0.ffn_gate_inp has 0 elements, not 256 for each of 8"),
    ("qwen3moe", without("blk.0.ffn_up_exps.weight"), "blk.0.* (ffn_down_exps, ffn_gate_exps) have 1,048,576 elements"),
    ("qwen3moe", held("blk.0.ffn_up_exps.weight", H, 512, 8), "blk.0.ffn_down_exps: experts of 256 x 256 contradict"),
    ("deepseek2", without(".attention.kv_lora_rank"), "deepseek2.attention.kv_lora_rank is missing"),
    ("deepseek2", without(".rope.dimension_count"), "deepseek2.rope.dimension_count is missing"),
    ("deepseek2", told(**{"attention.kv_lora_rank": 512}), "have 663,552 elements, fewer than the 860,160"),
    ("mamba", without(".ssm.state_size"), "mamba.ssm.state_size is missing"),
    ("mamba", told(**{"ssm.inner_size": 1024}), "have 436,224 elements, fewer than the 872,448"),
    (
        "falcon-h1",
        told(**{"ssm.time_step_rank": 3}),
        "ssm.inner_size 512 and falcon-h1.ssm.time_step_rank 3 contradict",
    ),
    ("qwen3next", told(**{"ssm.state_size": 16}), "qwen3next.ssm.inner_size 256 and"),
    ("lfm2", without(".shortconv.l_cache"), "lfm2.shortconv.l_cache is missing"),
    ("gemma2", told(**{"attention.sliding_window_pattern": [1, 0]}), "has 2 flags, and the model 4 layers"),
    ("gemma2", told(**{"attention.sliding_window_pattern": [3, 0, 0, 0]}), "outside the range of 0 to 1"),
    ("glm4moe", told(nextn_predict_layers=4), "nextn_predict_layers: is 4, outside the range of 0 to 3"),
    ("qwen4exp", told(**{"ple.layers": [0, 1]}), "qwen4exp.ple.layers: names several layers"),
    ("qwen4exp", told(**{"ple.layers": [4]}), "qwen4exp.ple.layers: is [4], outside the range of 0 to 3"),
    ("qwen4exp", without(".attention.compress_ratios"), "qwen4exp.attention.compress_ratios is missing"),
    ("qwen4exp", told(**{"attention.indexer.top_k": 62}), "budget 62 is not a multiple of ratio 4"),
    ("gemma3n", without("blk.0.ffn_down.weight"), "blk.0.ffn_down is missing, beside"),
]


@pytest.mark.parametrize(("name", "change", "says"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_contradicts_or_is_not_known_is_refused_by_its_name(
    name: str, change: Change, says: str, tmp_path: Path
) -> None:
    metadata, tensors = dict(MODELS[name].metadata), dict(MODELS[name].tensors)
    change(metadata, tensors)
    with pytest.raises(BadFile) as refused:
        spec_of(tmp_path, Model(metadata, tensors))
    assert str(refused.value).startswith(f"{tmp_path / 'model.gguf'}: ")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "described by hand (schema twin.model/2)" in refused.value.hint


@pytest.mark.parametrize("architecture", ["two words", " ", "x\ny", "a" * 65])
def test_an_architecture_has_the_name_of_one(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="not the name of an architecture"):
        spec_of(tmp_path, small(architecture, [DENSE]))


def test_what_goes_with_a_model_is_none(tmp_path: Path) -> None:
    projector = write(
        tmp_path / "mmproj.gguf", {"general.architecture": "clip"}, {"v.blk.0.attn_q.weight": ((H, H), "f16")}
    )
    with pytest.raises(BadFile, match=r"tensor token_embd\.weight is missing: no language model"):
        read_gguf(projector)


def test_layers_of_a_kind_are_one_kind(tmp_path: Path) -> None:
    biased = DENSE | bias(attn_q=(H,))
    spec = spec_of(tmp_path, small("llama", [DENSE, biased, MOE, NORMS | attention_of(), biased], keys={
        ".expert_count": 8, ".expert_used_count": 2}))  # fmt: skip
    assert Counter(spec.layer_kinds) == {"full_dense": 1, "full_dense_2": 2, "full_moe": 1, "full": 1}


def test_a_model_that_is_latent_in_files_of_old_has_one_matrix_for_keys_and_values(tmp_path: Path) -> None:
    metadata, tensors = MODELS["deepseek2"]
    old = {name: size for name, size in tensors.items() if "attn_k_b" not in name and "attn_v_b" not in name}
    old |= {f"blk.{layer}.attn_kv_b.weight": ((256, HEADS * 64), "q4_k") for layer in range(3)}
    told_of_old = {key: told for key, told in metadata.items() if "_mla" not in key}
    told_of_old |= {".attention.key_length": 64, ".attention.value_length": 32}
    spec = spec_of(tmp_path, Model(told_of_old, old))
    assert {bare(mixer) for mixer in spec.mixers} == {LATENT_MIXER}
    assert "attn_k_b.weight" in LATENT
