"""Metadata and tensors of small models of many architectures, as llama.cpp's converter names and shapes them."""

from typing import Any, NamedTuple

from tests.twin.models.gguf.written import Tensors

H, V, FF, HEADS, KV, D = 256, 1024, 512, 8, 2, 32


class Model(NamedTuple):
    """What a file is written from."""

    metadata: dict[str, Any]
    tensors: Tensors


def model(
    architecture: str,
    layers: list[Tensors],
    *,
    tied: bool = False,
    kind: str = "q4_k",
    keys: dict[str, Any] | None = None,
) -> Model:
    """A model of layers whose tensors are named without `blk.N.`, and of keys beside those that all models have."""
    metadata = {
        "general.architecture": architecture,
        "general.name": f"small {architecture}",
        "tokenizer.ggml.model": "none",
        ".block_count": len(layers),
        ".context_length": 8192,
        ".embedding_length": H,
        ".attention.head_count": HEADS,
        ".attention.head_count_kv": KV,
        ".rope.freq_base": 10000.0,
    }
    tensors: Tensors = {"token_embd.weight": ((H, V), "q6_k"), "output_norm.weight": ((H,), "f32")}
    if not tied:
        tensors["output.weight"] = ((H, V), "q8_0")
    for number, layer in enumerate(layers):
        for name, (dims, told) in layer.items():
            tensors[f"blk.{number}.{name}"] = (dims, told or (kind if len(dims) > 1 else "f32"))
    return Model(metadata | (keys or {}), tensors)


def of(**dims: tuple[int, ...]) -> Tensors:
    """Weights by kind, in the type of the model."""
    return {f"{kind}.weight": (size, "") for kind, size in dims.items()}


def f32(**dims: tuple[int, ...]) -> Tensors:
    """Weights by kind that stay in 32 bits, such as routers and convolutions."""
    return {f"{kind}.weight": (size, "f32") for kind, size in dims.items()}


def bias(**dims: tuple[int, ...]) -> Tensors:
    """Biases by kind."""
    return {f"{kind}.bias": (size, "f32") for kind, size in dims.items()}


NORMS = of(attn_norm=(H,), ffn_norm=(H,))


def attention(heads: int = HEADS, kv: int = KV, d: int = D, v: int = 0, gates: int = 0) -> Tensors:
    v = v or d
    queries = heads * d + gates
    return of(attn_q=(H, queries), attn_k=(H, kv * d), attn_v=(H, kv * v), attn_output=(heads * v, H))


MLP = of(ffn_gate=(H, FF), ffn_up=(H, FF), ffn_down=(FF, H))


def experts(count: int, width: int = 256, shared: int = 0) -> Tensors:
    held = f32(ffn_gate_inp=(H, count))
    held |= of(ffn_gate_exps=(H, width, count), ffn_up_exps=(H, width, count), ffn_down_exps=(width, H, count))
    if shared:
        held |= of(ffn_gate_shexp=(H, shared), ffn_up_shexp=(H, shared), ffn_down_shexp=(shared, H))
    return held


CHOSEN = bias(exp_probs_b=(8,))
QK_NORMS = of(attn_q_norm=(D,), attn_k_norm=(D,))
MOE_KEYS = {".expert_count": 8, ".expert_used_count": 2, ".expert_feed_forward_length": 256}
MLA_KEYS = {
    ".attention.head_count_kv": 1, ".attention.kv_lora_rank": 256, ".attention.q_lora_rank": 512,
    ".rope.dimension_count": 32, ".attention.key_length": 288, ".attention.value_length": 256,
    ".attention.key_length_mla": 64, ".attention.value_length_mla": 32,
}  # fmt: skip
LATENT = of(
    attn_q_a=(H, 512), attn_q_a_norm=(512,), attn_q_b=(512, HEADS * 64), attn_kv_a_mqa=(H, 288),
    attn_kv_a_norm=(256,), attn_output=(HEADS * 32, H),
) | {"attn_k_b.weight": ((32, 256, HEADS), "q8_0"), "attn_v_b.weight": ((256, 32, HEADS), "q8_0")}  # fmt: skip
SPARSE = of(**{"indexer.attn_k": (H, 128), "indexer.attn_q_b": (512, 4 * 128)}) | f32(**{"indexer.proj": (H, 4)})
SPARSE |= of(**{"indexer.k_norm": (128,)}) | bias(**{"indexer.k_norm": (128,)})
INDEXER_KEYS = {
    ".attention.indexer.head_count": 4,
    ".attention.indexer.key_length": 128,
    ".attention.indexer.top_k": 64,
}
MAMBA_2 = of(attn_norm=(H,), ssm_in=(H, 2 * 512 + 2 * 2 * 16 + 8), ssm_out=(512, H)) | bias(ssm_dt=(8,))
MAMBA_2 |= f32(ssm_conv1d=(4, 512 + 2 * 2 * 16), ssm_norm=(256, 2)) | bias(ssm_conv1d=(512 + 2 * 2 * 16,))
MAMBA_2 |= {"ssm_a": ((1, 8), "f32"), "ssm_d": ((1, 8), "f32")}
SSM_KEYS = {
    ".ssm.conv_kernel": 4, ".ssm.inner_size": 512, ".ssm.state_size": 16, ".ssm.time_step_rank": 8,
    ".ssm.group_count": 2,
}  # fmt: skip
MAMBA_1 = of(attn_norm=(H,), ssm_in=(H, 1024), ssm_x=(512, 16 + 2 * 16), ssm_out=(512, H)) | bias(ssm_dt=(512,))
MAMBA_1 |= f32(ssm_conv1d=(4, 512), ssm_dt=(16, 512)) | bias(ssm_conv1d=(512,))
MAMBA_1 |= {"ssm_a": ((16, 512), "f32"), "ssm_d": ((512,), "f32")}
DELTA_KEYS = {
    ".ssm.conv_kernel": 4, ".ssm.inner_size": 256, ".ssm.state_size": 32, ".ssm.time_step_rank": 8,
    ".ssm.group_count": 4,
}  # fmt: skip
DELTA_MIXER = of(attn_qkv=(H, 512), attn_gate=(H, 256), ssm_out=(256, H)) | f32(ssm_conv1d=(4, 512), ssm_norm=(32,))
DELTA_MIXER |= bias(ssm_dt=(8,)) | {"ssm_a": ((8,), "f32")}
DELTA = DELTA_MIXER | of(attn_norm=(H,), post_attention_norm=(H,))
SHARED = experts(8, 256, 256) | of(ffn_gate_inp_shexp=(H,))
KIMI = attention(kv=HEADS) | NORMS | f32(ssm_f_a=(H, D), ssm_f_b=(D, H), ssm_g_a=(H, D), ssm_g_b=(D, H))
KIMI |= f32(**{f"ssm_conv1d_{which}": (4, 1, H) for which in "qkv"}, ssm_beta=(H, HEADS), ssm_norm=(D,))
KIMI |= bias(ssm_dt=(H,)) | {"ssm_a": ((1, HEADS), "f32")}
CONV = NORMS | of(**{"shortconv.in_proj": (H, 3 * H), "shortconv.out_proj": (H, H)}) | f32(**{"shortconv.conv": (3, H)})
GPT_OSS = attention(d=64) | experts(8) | of(attn_norm=(H,), post_attention_norm=(H,)) | f32(attn_sinks=(HEADS,))
GPT_OSS |= bias(attn_q=(512,), attn_k=(128,), attn_v=(128,), attn_output=(H,), ffn_gate_inp=(8,))
GPT_OSS |= bias(ffn_gate_exps=(256, 8), ffn_up_exps=(256, 8), ffn_down_exps=(H, 8))
POST_NORMS = NORMS | of(post_attention_norm=(H,), post_ffw_norm=(H,))
MTP = of(**{"nextn.eh_proj": (2 * H, H), "nextn.enorm": (H,), "nextn.hnorm": (H,), "nextn.shared_head_norm": (H,)})
GEMMA_3N = POST_NORMS | attention() | QK_NORMS | MLP | of(laurel_l=(H, 256), laurel_r=(256, H), proj=(256, H))
GEMMA_3N |= of(
    inp_gate=(H, 256), post_norm=(H,), laurel_post_norm=(H,), altup_correct_scale=(H,), altup_router_norm=(H,)
)
GEMMA_3N |= f32(altup_correct_coef=(4, 4), altup_predict_coef=(4, 16), altup_router=(H, 4))
GEMMA_4 = POST_NORMS | MLP | of(inp_gate=(H, 256), proj=(256, H), post_norm=(H,), layer_output_scale=(1,))
KEYS_AS_VALUES = of(attn_q=(H, 512), attn_k=(H, 64), attn_output=(512, H))
QUERIES_ALONE = of(attn_q=(H, H), attn_output=(H, H))

HYPER = f32(hc_attn_norm=(H, 4), hc_ffn_norm=(H, 4), hc_attn_inject=(4 * H, 4), hc_ffn_inject=(4 * H, 4))
HYPER |= of(hc_attn_down=(4 * H, 256), hc_attn_up=(256, 4 * H), hc_ffn_down=(4 * H, 256), hc_ffn_up=(256, 4 * H))
QWEN_4 = HYPER | SHARED
QWEN_4_DELTA = QWEN_4 | DELTA_MIXER | of(ssm_alpha=(H, 8), ssm_beta=(H, 8))
QWEN_4_SPARSE = QWEN_4 | attention(gates=256) | of(**{"indexer.q_proj": (H, 4 * 128), "indexer.k_proj": (H, 128)})
QWEN_4_SPARSE |= QK_NORMS | of(**{"indexer.q_norm": (128,), "indexer.k_norm": (128,)})
NGRAMS = of(ple_key=(H, 4 * H), ple_value=(H, H), ple_norm_key=(H, 4), ple_norm_query=(H, 4), ple_norm_conv=(H, 4))
NGRAMS |= f32(ple_conv1d=(4, 4 * H))

DENSE = attention() | NORMS | MLP
MOE = attention() | NORMS | QK_NORMS | experts(8)

MODELS: dict[str, Model] = {
    "llama": model("llama", [DENSE] * 3),
    "qwen2": model("qwen2", [DENSE | bias(attn_q=(256,), attn_k=(64,), attn_v=(64,))] * 2, tied=True, kind="q8_0"),
    "qwen3": model("qwen3", [attention(d=64) | NORMS | of(attn_q_norm=(64,), attn_k_norm=(64,)) | MLP] * 2,
                   keys={".attention.key_length": 64, ".attention.value_length": 64}),
    "qwen3moe": model("qwen3moe", [MOE] * 2, kind="iq4_xs", keys=MOE_KEYS),
    "gemma2": model("gemma2", [POST_NORMS | attention() | MLP] * 4, tied=True,
                    keys={".attention.sliding_window": 4096}),
    "gemma3": model("gemma3", [POST_NORMS | attention() | QK_NORMS | MLP] * 8, tied=True, kind="q4_0",
                    keys={".attention.sliding_window": 512, ".attention.key_length": D, ".attention.value_length": D}),
    "gemma3n": model("gemma3n", [GEMMA_3N] * 22, tied=True, keys={
        ".attention.sliding_window": 512, ".attention.sliding_window_pattern": [True] * 4 + [False] + [True] * 17}),
    "gemma4": model("gemma4", [GEMMA_4 | attention()] * 2 + [GEMMA_4 | KEYS_AS_VALUES] + [GEMMA_4 | QUERIES_ALONE],
                    tied=True, keys={
        ".attention.sliding_window": 512, ".attention.sliding_window_pattern": [True, True, False, True],
        ".attention.key_length": 64, ".attention.value_length": 64, ".attention.key_length_swa": D,
        ".attention.value_length_swa": D, ".attention.head_count_kv": [KV, KV, 1, KV],
        ".attention.shared_kv_layers": 1, ".embedding_length_per_layer_input": 256}),
    "gpt-oss": model("gpt-oss", [GPT_OSS] * 4, kind="mxfp4", keys=MOE_KEYS | {
        ".attention.sliding_window": 128, ".attention.key_length": 64, ".attention.value_length": 64}),
    "llama4": model("llama4", [NORMS | attention() | experts(8, shared=256), NORMS | attention() | MLP] * 4,
                    keys=MOE_KEYS | {".expert_used_count": 1}),
    "deepseek2": model("deepseek2", [NORMS | LATENT | MLP] + [NORMS | LATENT | experts(8, shared=512) | CHOSEN] * 2,
                       keys=MOE_KEYS | MLA_KEYS | {".leading_dense_block_count": 1}),
    "glm-dsa": model("glm-dsa", [NORMS | LATENT | SPARSE | MLP, NORMS | LATENT | experts(8)] * 2,
                     keys=MOE_KEYS | MLA_KEYS | INDEXER_KEYS),
    "phi3": model("phi3", [NORMS | of(attn_qkv=(H, 384), attn_output=(H, H), ffn_up=(H, 2 * FF), ffn_down=(FF, H))] * 2,
                  keys={".attention.sliding_window": 2047}),
    "glm4moe": model("glm4moe", [DENSE] + [NORMS | attention() | experts(8, shared=256) | CHOSEN] * 2 + [MOE | MTP],
                     keys=MOE_KEYS | {".nextn_predict_layers": 1}),
    "nemotron_h": model("nemotron_h", [
        MAMBA_2, of(attn_norm=(H,), ffn_up=(H, FF), ffn_down=(FF, H)), MAMBA_2, of(attn_norm=(H,)) | attention()],
        keys=SSM_KEYS | {".attention.head_count_kv": [0, 0, 0, KV], ".attention.head_count": [0, 0, 0, HEADS]}),
    "granitehybrid": model("granitehybrid", [MAMBA_2 | of(ffn_norm=(H,)) | experts(8, shared=512), MOE] * 2,
                           keys=SSM_KEYS | MOE_KEYS | {".attention.head_count_kv": [0, KV, 0, KV]}),
    "falcon-h1": model("falcon-h1", [MAMBA_2 | DENSE] * 2, keys=SSM_KEYS),
    "mamba": model("mamba", [MAMBA_1] * 2, tied=True, kind="f16", keys=SSM_KEYS | {".ssm.time_step_rank": 16}),
    "jamba": model("jamba", [MAMBA_1 | of(ffn_norm=(H,), ssm_dt_norm=(16,), ssm_b_norm=(16,)) | MLP, MOE],
                   keys=SSM_KEYS | MOE_KEYS | {".ssm.time_step_rank": 16, ".attention.head_count_kv": [0, KV]}),
    "qwen3next": model("qwen3next", [DELTA | of(ssm_ba=(H, 16)) | SHARED] * 3
                       + [attention(gates=256) | NORMS | QK_NORMS | SHARED],
                       keys=MOE_KEYS | DELTA_KEYS),
    "qwen35": model("qwen35", [DELTA | of(ssm_alpha=(H, 8), ssm_beta=(H, 8)) | MLP] * 3
                    + [attention(gates=256) | NORMS | QK_NORMS | MLP], keys=DELTA_KEYS),
    "qwen4exp": model("qwen4exp", [QWEN_4_DELTA, QWEN_4_DELTA | NGRAMS, QWEN_4_DELTA, QWEN_4_SPARSE],
                      keys=MOE_KEYS | DELTA_KEYS | INDEXER_KEYS | {
        ".hyper_connection.count": 4, ".attention.compress_ratios": [0, 0, 0, 4], ".ple.layers": [1],
        ".ple.ngram_size": 3, ".ple.heads_per_ngram": 4, ".attention.indexer.top_k": 64}),
    "kimi-linear": model("kimi-linear", [KIMI | MLP, NORMS | LATENT | experts(8, shared=256)],
                         keys=MOE_KEYS | MLA_KEYS | {".kda.head_dim": D, ".ssm.conv_kernel": 4}),
    "lfm2": model("lfm2", [CONV | MLP] * 2 + [DENSE | QK_NORMS], tied=True,
                  keys={".shortconv.l_cache": 3, ".attention.head_count_kv": [0, 0, KV]}),
    "afmoe": model("afmoe", [DENSE | QK_NORMS | of(attn_gate=(H, H))] * 4, keys={".attention.sliding_window": 64}),
    "step35": model("step35", [DENSE | of(attn_gate=(H, HEADS))] * 2, keys={
        ".attention.sliding_window": 64, ".attention.sliding_window_pattern": [True, False]}),
    "mimo2": model("mimo2", [NORMS | MLP | attention(d=64, v=32), NORMS | MLP | attention(kv=4, d=64, v=32)], keys={
        ".attention.sliding_window": 64, ".attention.sliding_window_pattern": [False, True],
        ".attention.head_count_kv": [KV, 4], ".attention.key_length": 64, ".attention.value_length": 32}),
    "gpt2": model("gpt2", [NORMS | of(attn_qkv=(H, 768), attn_output=(H, H), ffn_up=(H, FF), ffn_down=(FF, H))
                           | bias(attn_qkv=(768,), ffn_up=(FF,), ffn_down=(H,), attn_norm=(H,))] * 2,
                  keys={".attention.head_count_kv": HEADS}),
    "minimax-01": model("minimax-01", [
        NORMS | of(attn_qkv=(H, 768), attn_gate=(H, H), attn_norm_2=(H,), attn_output=(H, H)) | experts(8), MOE],
        keys=MOE_KEYS | {".attention.key_length": D, ".attention.value_length": D}),
    "deci": model("deci", [DENSE, of(ffn_norm=(H,)) | MLP, NORMS | attention(kv=4) | of(
        ffn_gate=(H, 256), ffn_up=(H, 256), ffn_down=(256, H))],
        keys={".attention.head_count": [HEADS, 0, HEADS], ".attention.head_count_kv": [KV, 0, 4]}),
    "mixtral of old": model("llama", [attention() | NORMS | f32(ffn_gate_inp=(H, 4)) | {
        f"ffn_{which}.{number}.weight": (dims, "") for number in range(4)
        for which, dims in (("gate", (H, FF)), ("up", (H, FF)), ("down", (FF, H)))}] * 2,
        keys={".expert_count": 4, ".expert_used_count": 2}),
}  # fmt: skip
MODELS["gemma3n"].tensors.update({
    "per_layer_token_embd.weight": ((22 * 256, V), "q8_0"), "per_layer_model_proj.weight": ((H, 22 * 256), "bf16"),
    "altup_proj.weight": ((H, H, 3), "f16"), "altup_unembd_proj.weight": ((H, H, 3), "f16"),
    "per_layer_proj_norm.weight": ((256,), "f32"),
})  # fmt: skip
MODELS["gemma4"].tensors.update({
    "per_layer_token_embd.weight": ((4 * 256, V), "q8_0"), "per_layer_model_proj.weight": ((H, 4 * 256), "bf16"),
    "per_layer_proj_norm.weight": ((256,), "f32"),
})  # fmt: skip
MODELS["qwen4exp"].tensors.update({
    "per_layer_token_embd.weight": ((32, 5000), "q5_0"), "output_hc_norm.weight": ((H, 4), "f32"),
    "output_hc_down.weight": ((4 * H, 256), "q4_k"), "output_hc_up.weight": ((256, 4 * H), "q4_k"),
})  # fmt: skip
del MODELS["qwen4exp"].tensors["output_norm.weight"]
MODELS["gpt2"].tensors["position_embd.weight"] = ((H, 1024), "f32")
MODELS["lfm2"].tensors["v.blk.0.attn_q.weight"] = ((H, H), "f16")
