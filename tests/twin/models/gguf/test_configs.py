"""A GGUF and the config.json that it was converted from are one model: parameters by part, caches and states."""

from pathlib import Path
from typing import Any

import pytest

from tests.twin.models.gguf.shapes import FF, HEADS, KV, MODELS, D, H, V
from tests.twin.models.gguf.written import write
from twin.models.config import read_config
from twin.models.gguf import read_gguf
from twin.models.spec import ModelSpec

BASE = {
    "hidden_size": H, "vocab_size": V, "intermediate_size": FF, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "max_position_embeddings": 8192,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1}
LATENT = {
    "kv_lora_rank": 256, "q_lora_rank": 512, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "head_dim": D, "shared_expert_intermediate_size": 256,
}  # fmt: skip
STREAMS = {"hc_count": 4, "hc_lowrank": 256}
POOLED = {"indexer_budget": 64, "indexer_compress_ratio": 4, "indexer_n_heads": 4, "indexer_head_dim": 128}
NGRAMS = {"ple_layer_ids": [2], "ngram_size": 3, "heads_per_ngram": 4, "ple_embed_dim": H, "ngram_vocab_size_base": 200}
MAMBA_2 = {
    "mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_d_conv": 4, "head_dim": D, "mamba_rms_norm": True,
}  # fmt: skip
NEMOTRON = {
    "hybrid_override_pattern": "M-M*", "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 16,
    "conv_kernel": 4, "head_dim": D, "expand": 2,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}

CONFIGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", 3, {}),
    "qwen2": ("Qwen2ForCausalLM", 2, TIED),
    "qwen3": ("Qwen3ForCausalLM", 2, {"head_dim": 64}),
    "qwen3moe": ("Qwen3MoeForCausalLM", 2, {"head_dim": D} | MOE),
    "mixtral of old": ("MixtralForCausalLM", 2, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2ForCausalLM", 4, {"head_dim": D, "sliding_window": 4096} | TIED),
    "gemma3": ("Gemma3ForCausalLM", 8, {"head_dim": D, "sliding_window": 512} | TIED),
    "gpt-oss": ("GptOssForCausalLM", 4, {
        "head_dim": 64, "sliding_window": 128, "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 256}),
    "deepseek2": ("DeepseekV3ForCausalLM", 3, ROUTED | LATENT | {"n_shared_experts": 2}),
    "phi3": ("Phi3ForCausalLM", 2, {}),
    "glm4moe": ("Glm4MoeForCausalLM", 3, ROUTED | {
        "head_dim": D, "n_shared_experts": 1, "use_qk_norm": False, "attention_bias": False}),
    "falcon-h1": ("FalconH1ForCausalLM", 2, MAMBA_2),
    "nemotron_h": ("NemotronHForCausalLM", 4, NEMOTRON),
    "mamba": ("MambaForCausalLM", 2, {"state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 16} | TIED),
    "qwen3next": ("Qwen3NextForCausalLM", 4, MOE | LINEAR),
    "qwen4exp": ("Qwen4ExpForCausalLM", 4, MOE | LINEAR | STREAMS | POOLED | NGRAMS),
    "lfm2": ("Lfm2ForCausalLM", 3, {
        "conv_L_cache": 3, "full_attn_idxs": [2], "block_auto_adjust_ff_dim": False, "block_ff_dim": FF} | TIED),
}  # fmt: skip


def kept(model: ModelSpec) -> tuple[Any, ...]:
    """What a sequence keeps of each layer, and what a token runs through."""
    caches = {(mixer.kv_elements, mixer.reach, mixer.indexer): count for mixer, count in model.caches.items()}
    states = {(mixer.state_elements, mixer.conv_channels): count for mixer, count in model.states.items()}
    return caches, states, model.active_parameters, model.residual_streams


@pytest.mark.parametrize("name", CONFIGS)
def test_both_are_the_same_model(name: str, tmp_path: Path) -> None:
    architecture, layers, own = CONFIGS[name]
    config = BASE | {"architectures": [architecture], "num_hidden_layers": layers} | own
    converted = read_gguf(write(tmp_path / "model.gguf", *MODELS[name])).spec
    model = read_config(config, "config.json", name=name).spec
    assert {part: count for part, count in model.parameters.items() if count} == {
        part: count for part, count in converted.parameters.items() if count
    }
    assert kept(converted) == kept(model)
    assert (converted.layers, converted.tied, converted.native_ctx_tokens) == (layers, model.tied, 8192)
