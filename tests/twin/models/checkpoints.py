"""Checkpoints of every kind, tensor by tensor under their published names, with the part that each belongs to."""

from typing import Any

from tests.twin.models.written import Checkpoint, Named, named

LAYERS = range(2)
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 256, "torch_dtype": "bfloat16",
}  # fmt: skip

EMBEDDING = named("model.embed_tokens.weight BF16 96x64")
HEAD = named("lm_head.weight BF16 96x64")
NORMS = named("model.norm.weight BF16 64") | named(
    """model.layers.{n}.input_layernorm.weight BF16 64
    model.layers.{n}.post_attention_layernorm.weight BF16 64""",
    n=LAYERS,
)
ATTENTION = named(
    """model.layers.{n}.self_attn.q_proj.weight BF16 64x64
    model.layers.{n}.self_attn.k_proj.weight BF16 32x64
    model.layers.{n}.self_attn.v_proj.weight BF16 32x64
    model.layers.{n}.self_attn.o_proj.weight BF16 64x64""",
    n=LAYERS,
)
MLP = named(
    """model.layers.{n}.mlp.gate_proj.weight BF16 128x64
    model.layers.{n}.mlp.up_proj.weight BF16 128x64
    model.layers.{n}.mlp.down_proj.weight BF16 64x128""",
    n=LAYERS,
)
ENDS = {"embedding": EMBEDDING, "head": HEAD, "vectors": NORMS}
PLAIN = Checkpoint(LLAMA, {**ENDS, "attention": ATTENTION, "feed_forward": MLP})


def rewritten(tensors: Named, kinds: str) -> Named:
    """Each matrix as a quantiser writes it: lines of (suffix, type, sizes by {rows}, {columns} and shares of them)."""
    found: Named = {}
    for name, (_, (rows, columns)) in tensors.items():
        module = name.removesuffix(".weight")
        for line in kinds.split("\n"):
            if line.strip():
                suffix, dtype, *sizes = line.split()
                shape = [int(eval(each, {"r": rows, "c": columns})) for each in sizes[0].split("x")] if sizes else []  # noqa: S307
                found[f"{module}.{suffix}"] = (dtype, shape)
    return found


def quantised(kinds: str, *, head: bool = False, vectors: str = "", **config: Any) -> Checkpoint:
    """Llama with all matrices of its layers as a quantiser writes them; `vectors`: what that adds to them."""
    parts = {**ENDS, "attention": rewritten(ATTENTION, kinds), "feed_forward": rewritten(MLP, kinds)}
    if head:
        parts["head"] = rewritten(HEAD, kinds)
    if vectors:
        parts["vectors"] = NORMS | rewritten(ATTENTION | MLP, vectors)
    return Checkpoint(LLAMA | config, parts)


AWQ = quantised(
    "qweight I32 cxr//8 \n qzeros I32 c//16xr//8 \n scales F16 c//16xr",
    quantization_config={"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
)
GPTQ = quantised(
    "qweight I32 c//8xr \n qzeros I32 c//16xr//8 \n scales F16 c//16xr \n g_idx I32 c",
    vectors="bias F16 r",
    quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False},
)
COMPRESSED = quantised(
    "weight_packed I32 rxc//8 \n weight_scale BF16 rxc//16 \n weight_shape I64 2",
    quantization_config={
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}}},
    },
)  # fmt: skip
NVFP4 = quantised(
    "weight U8 rxc//2 \n weight_scale F8_E4M3 rxc//16 \n weight_scale_2 F32 \n input_scale F32",
    quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
)
NF4 = quantised(
    """weight U8 r*c//2x1
    weight.absmax U8 r*c//64
    weight.quant_map F32 16
    weight.nested_absmax F32 1
    weight.nested_quant_map F32 256
    weight.quant_state.bitsandbytes__nf4 U8 91""",
    quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
)
EXL3 = quantised(
    "trellis I16 c//16xr//16x48 \n suh F16 c \n svh F16 r \n mcg I32",
    head=True,
    quantization_config={"quant_method": "exl3", "bits": 3.0, "head_bits": 3},
)

DEEPSEEK = Checkpoint(
    {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 64,
        "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "vocab_size": 96,
        "max_position_embeddings": 256, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]},
    },
    {
        **ENDS,
        "vectors": NORMS | named("model.layers.1.mlp.gate.e_score_correction_bias F32 4") | named(
            """model.layers.{n}.self_attn.q_a_layernorm.weight BF16 32
            model.layers.{n}.self_attn.kv_a_layernorm.weight BF16 16""", n=LAYERS),
        "attention": named(
            """model.layers.{n}.self_attn.q_a_proj.weight F8_E4M3 32x64
            model.layers.{n}.self_attn.q_a_proj.weight_scale_inv F32 2x4
            model.layers.{n}.self_attn.q_b_proj.weight F8_E4M3 96x32
            model.layers.{n}.self_attn.q_b_proj.weight_scale_inv F32 6x2
            model.layers.{n}.self_attn.kv_a_proj_with_mqa.weight F8_E4M3 24x64
            model.layers.{n}.self_attn.kv_a_proj_with_mqa.weight_scale_inv F32 2x4
            model.layers.{n}.self_attn.kv_b_proj.weight F8_E4M3 128x16
            model.layers.{n}.self_attn.kv_b_proj.weight_scale_inv F32 8x1
            model.layers.{n}.self_attn.o_proj.weight F8_E4M3 64x64
            model.layers.{n}.self_attn.o_proj.weight_scale_inv F32 4x4""", n=LAYERS),
        "router": named("model.layers.1.mlp.gate.weight BF16 4x64"),
        "experts": named(
            """model.layers.1.mlp.experts.{e}.gate_proj.weight F8_E4M3 32x64
            model.layers.1.mlp.experts.{e}.gate_proj.weight_scale_inv F32 2x4
            model.layers.1.mlp.experts.{e}.up_proj.weight F8_E4M3 32x64
            model.layers.1.mlp.experts.{e}.down_proj.weight F8_E4M3 64x32""", e=range(4)),
        "feed_forward": named(
            """model.layers.1.mlp.shared_experts.gate_proj.weight F8_E4M3 32x64
            model.layers.1.mlp.shared_experts.up_proj.weight F8_E4M3 32x64
            model.layers.1.mlp.shared_experts.down_proj.weight F8_E4M3 64x32
            model.layers.1.mlp.shared_experts.down_proj.weight_scale_inv F32 4x2
            model.layers.0.mlp.gate_proj.weight F8_E4M3 128x64
            model.layers.0.mlp.up_proj.weight F8_E4M3 128x64
            model.layers.0.mlp.down_proj.weight F8_E4M3 64x128"""),
        "mtp": named(
            """model.layers.2.embed_tokens.weight BF16 96x64
            model.layers.2.enorm.weight BF16 64
            model.layers.2.hnorm.weight BF16 64
            model.layers.2.eh_proj.weight BF16 64x128
            model.layers.2.shared_head.norm.weight BF16 64
            model.layers.2.shared_head.head.weight BF16 96x64
            model.layers.2.mlp.gate.e_score_correction_bias F32 4
            model.layers.2.mlp.experts.0.up_proj.weight F8_E4M3 32x64
            model.layers.2.self_attn.o_proj.weight F8_E4M3 64x64"""),
    },
)  # fmt: skip

GPT_OSS = Checkpoint(
    {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
        "max_position_embeddings": 256, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32,
        "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
    },
    {
        **ENDS,
        "vectors": NORMS | named(
            """model.layers.{n}.self_attn.q_proj.bias BF16 64
            model.layers.{n}.self_attn.k_proj.bias BF16 32
            model.layers.{n}.self_attn.v_proj.bias BF16 32
            model.layers.{n}.self_attn.o_proj.bias BF16 64
            model.layers.{n}.self_attn.sinks BF16 4
            model.layers.{n}.mlp.router.bias BF16 4
            model.layers.{n}.mlp.experts.gate_up_proj_bias BF16 4x128
            model.layers.{n}.mlp.experts.down_proj_bias BF16 4x64""", n=LAYERS),
        "attention": ATTENTION,
        "router": named("model.layers.{n}.mlp.router.weight BF16 4x64", n=LAYERS),
        "experts": named(
            """model.layers.{n}.mlp.experts.gate_up_proj_blocks U8 4x128x2x16
            model.layers.{n}.mlp.experts.gate_up_proj_scales U8 4x128x2
            model.layers.{n}.mlp.experts.down_proj_blocks U8 4x64x2x16
            model.layers.{n}.mlp.experts.down_proj_scales U8 4x64x2""", n=LAYERS),
    },
)  # fmt: skip

QWEN3_NEXT = Checkpoint(
    {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 64,
        "intermediate_size": 128, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 96, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    {
        **ENDS,
        "vectors": NORMS | named(
            """model.layers.0.linear_attn.A_log BF16 4
            model.layers.0.linear_attn.dt_bias BF16 4
            model.layers.0.linear_attn.norm.weight BF16 16
            model.layers.1.self_attn.q_norm.weight BF16 16
            model.layers.1.self_attn.k_norm.weight BF16 16"""),
        "attention": named(
            """model.layers.0.linear_attn.conv1d.weight BF16 128x1x4
            model.layers.0.linear_attn.in_proj_qkvz.weight BF16 192x64
            model.layers.0.linear_attn.in_proj_ba.weight BF16 8x64
            model.layers.0.linear_attn.out_proj.weight BF16 64x64
            model.layers.1.self_attn.q_proj.weight BF16 128x64
            model.layers.1.self_attn.k_proj.weight BF16 32x64
            model.layers.1.self_attn.v_proj.weight BF16 32x64
            model.layers.1.self_attn.o_proj.weight BF16 64x64"""),
        "router": named("model.layers.{n}.mlp.gate.weight BF16 4x64", n=LAYERS),
        "experts": named(
            """model.layers.{n}.mlp.experts.{e}.gate_proj.weight BF16 32x64
            model.layers.{n}.mlp.experts.{e}.up_proj.weight BF16 32x64
            model.layers.{n}.mlp.experts.{e}.down_proj.weight BF16 64x32""", n=LAYERS, e=range(4)),
        "feed_forward": named(
            """model.layers.{n}.mlp.shared_expert_gate.weight BF16 1x64
            model.layers.{n}.mlp.shared_expert.gate_proj.weight BF16 32x64
            model.layers.{n}.mlp.shared_expert.up_proj.weight BF16 32x64
            model.layers.{n}.mlp.shared_expert.down_proj.weight BF16 64x32""", n=LAYERS),
        "mtp": named(
            """mtp.fc.weight BF16 64x128
            mtp.norm.weight BF16 64
            mtp.pre_fc_norm_embedding.weight BF16 64
            mtp.pre_fc_norm_hidden.weight BF16 64
            mtp.layers.0.input_layernorm.weight BF16 64
            mtp.layers.0.self_attn.q_proj.weight BF16 128x64
            mtp.layers.0.mlp.experts.0.gate_proj.weight BF16 32x64"""),
    },
)  # fmt: skip

NEMOTRON_H = Checkpoint(
    {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 4, "hybrid_override_pattern": "M*-E", "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 2, "conv_kernel": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 48, "vocab_size": 96,
        "max_position_embeddings": 256, "tie_word_embeddings": False,
    },
    {
        "embedding": named("backbone.embeddings.weight BF16 96x64"),
        "head": HEAD,
        "vectors": named("backbone.layers.{n}.norm.weight BF16 64", n=range(4)) | named(
            """backbone.norm_f.weight BF16 64
            backbone.layers.0.mixer.A_log BF16 4
            backbone.layers.0.mixer.D BF16 4
            backbone.layers.0.mixer.dt_bias BF16 4
            backbone.layers.0.mixer.conv1d.bias BF16 96
            backbone.layers.0.mixer.norm.weight BF16 64
            backbone.layers.3.mixer.gate.e_score_correction_bias F32 4"""),
        "attention": named(
            """backbone.layers.0.mixer.conv1d.weight BF16 96x1x4
            backbone.layers.0.mixer.in_proj.weight BF16 164x64
            backbone.layers.0.mixer.out_proj.weight BF16 64x64
            backbone.layers.1.mixer.q_proj.weight BF16 64x64
            backbone.layers.1.mixer.k_proj.weight BF16 32x64
            backbone.layers.1.mixer.v_proj.weight BF16 32x64
            backbone.layers.1.mixer.o_proj.weight BF16 64x64"""),
        "router": named("backbone.layers.3.mixer.gate.weight BF16 4x64"),
        "experts": named(
            """backbone.layers.3.mixer.experts.{e}.up_proj.weight BF16 32x64
            backbone.layers.3.mixer.experts.{e}.down_proj.weight BF16 64x32""", e=range(4)),
        "feed_forward": named(
            """backbone.layers.2.mixer.up_proj.weight BF16 128x64
            backbone.layers.2.mixer.down_proj.weight BF16 64x128
            backbone.layers.3.mixer.shared_experts.up_proj.weight BF16 48x64
            backbone.layers.3.mixer.shared_experts.down_proj.weight BF16 64x48"""),
    },
)  # fmt: skip


def outside(tensors: Named) -> Named:
    """Under the names of a language model within a multimodal one."""
    return {f"language_model.{name}": told for name, told in tensors.items()}


LLAVA = Checkpoint(
    {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
        "text_config": {key: value for key, value in LLAMA.items() if key != "architectures"},
    },
    {
        **{part: outside(tensors) for part, tensors in PLAIN.parts.items()},
        "vision": named(
            """vision_tower.vision_model.embeddings.class_embedding BF16 32
            vision_tower.vision_model.embeddings.patch_embedding.weight BF16 32x3x14x14
            vision_tower.vision_model.encoder.layers.{n}.mlp.fc1.weight BF16 64x32
            vision_tower.vision_model.encoder.layers.{n}.mlp.fc1.bias BF16 64
            vision_tower.vision_model.encoder.layers.{n}.self_attn.q_proj.weight BF16 32x32
            multi_modal_projector.linear_1.weight BF16 64x32""", n=range(3)),
    },
)  # fmt: skip

GRANITE = Checkpoint(
    {
        "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "hidden_size": 64,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 96, "max_position_embeddings": 256, "num_local_experts": 4, "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
    {
        "embedding": EMBEDDING,
        "vectors": NORMS,
        "attention": ATTENTION,
        "router": named("model.layers.{n}.block_sparse_moe.router.layer.weight BF16 4x64", n=LAYERS),
        "experts": named(
            """model.layers.{n}.block_sparse_moe.input_linear.weight BF16 4x64x64
            model.layers.{n}.block_sparse_moe.output_linear.weight BF16 4x64x32""", n=LAYERS),
    },
)  # fmt: skip

GPT2 = Checkpoint(
    {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_positions": 32, "n_ctx": 32, "vocab_size": 96,
    },
    {
        "embedding": named("wte.weight F32 96x64 \n wpe.weight F32 32x64"),
        "vectors": named(
            """ln_f.weight F32 64
            ln_f.bias F32 64
            h.{n}.ln_1.weight F32 64
            h.{n}.ln_1.bias F32 64
            h.{n}.ln_2.weight F32 64
            h.{n}.ln_2.bias F32 64
            h.{n}.attn.c_attn.bias F32 192
            h.{n}.attn.c_proj.bias F32 64
            h.{n}.mlp.c_fc.bias F32 256
            h.{n}.mlp.c_proj.bias F32 64""", n=LAYERS),
        "attention": named("h.{n}.attn.c_attn.weight F32 64x192 \n h.{n}.attn.c_proj.weight F32 64x64", n=LAYERS),
        "feed_forward": named("h.{n}.mlp.c_fc.weight F32 64x256 \n h.{n}.mlp.c_proj.weight F32 256x64", n=LAYERS),
        "unused": named("h.{n}.attn.bias F32 1x1x32x32 \n h.{n}.attn.masked_bias F32", n=LAYERS),
    },
)  # fmt: skip

TIED = PLAIN.without("head")._replace(config=LLAMA | {"tie_word_embeddings": True})
STORED_AGAIN = TIED._replace(parts=TIED.parts | {"unused": HEAD})
HEAD_ALONE = TIED._replace(parts=TIED.without("embedding").parts | {"embedding": HEAD})

CHECKPOINTS: dict[str, Checkpoint] = {
    "plain": PLAIN, "tied": TIED, "tied and stored again": STORED_AGAIN, "tied and stored as head": HEAD_ALONE,
    "awq": AWQ, "gptq": GPTQ, "compressed-tensors": COMPRESSED, "nvfp4": NVFP4, "nf4": NF4, "exl3": EXL3,
    "fp8, latent, shared experts, router bias, mtp": DEEPSEEK, "mxfp4 experts": GPT_OSS, "gated delta": QWEN3_NEXT,
    "mamba": NEMOTRON_H, "vision": LLAVA, "fused experts": GRANITE, "masks": GPT2,
}  # fmt: skip
