"""Dense decoders: attention and an MLP behind norms, layer after layer, of one kind or with windows in most layers.

Sources: the modeling files of transformers 5.24 by the names of the classes, and of the checkpoints where it has none.
"""

from msgspec.structs import replace

from twin.models.config import windows
from twin.models.config.decoder import (
    ATTENTION_BIAS,
    BIASED,
    MLP_BIAS,
    Style,
    decoder,
    dense_feeds,
    head_norms,
    wide_norms,
)
from twin.models.config.shape import Reader

_BIASED_MLP = dense_feeds(bias=MLP_BIAS)
_TWO_MATRICES = dense_feeds(gated=False)
_TWO_BIASED = dense_feeds(gated=False, bias=MLP_BIAS)

LLAMA = replace(BIASED, feeds=_BIASED_MLP)
QWEN2 = Style(qkv_bias=True, windows=windows.qwen)
QWEN3 = replace(BIASED, qk_norms=head_norms, head_dim=128, windows=windows.qwen)


STYLES: tuple[tuple[Style, tuple[str, ...]], ...] = (
    (
        LLAMA,
        # the checkpoints' own code of MiniCPM, Yi, XVERSE, Aquila and Baichuan is that of Llama, constants aside
        (
            "LlamaForCausalLM",
            "llama",
            "code_llama",
            "MiniCPMForCausalLM",
            "minicpm",
            "YiForCausalLM",
            "Yi",
            "XverseForCausalLM",
            "xverse",
            "AquilaForCausalLM",
            "BaichuanForCausalLM",
            "BaiChuanForCausalLM",
            "baichuan",
            "aquila",
            "GraniteForCausalLM",
            "granite",
            "ExaoneForCausalLM",
            "exaone",
            "IQuestCoderForCausalLM",
            "iquestcoder",
            "LLaMAForCausalLM",
        ),
    ),
    (Style(windows=windows.same(4096)), ("MistralForCausalLM", "mistral")),
    (Style(windows=windows.typed(0, default=4096)), ("MinistralForCausalLM", "ministral")),
    (Style(windows=windows.same()), ("Ministral3ForCausalLM", "ministral3", "Phi3ForCausalLM", "phi3")),
    (
        QWEN2,
        (
            "Qwen2ForCausalLM",
            "qwen2",
            "Qwen2VLForConditionalGeneration",
            "qwen2_vl_text",
            "qwen2_vl",
            "Qwen2_5_VLForConditionalGeneration",
            "qwen2_5_vl_text",
            "qwen2_5_vl",
            "qwen2_5_omni_text",
        ),
    ),
    # MiMo-7B is Qwen2 with a bias by its key and a layer that predicts
    (Style(qkv_bias=("attention_bias", True), windows=windows.qwen, predicts=True), ("MiMoForCausalLM", "mimo")),
    (QWEN3, ("Qwen3ForCausalLM", "qwen3", "Qwen3VLForConditionalGeneration", "qwen3_vl_text", "qwen3_vl")),
    (replace(BIASED, feeds=_BIASED_MLP, tied=True, windows=windows.smollm), ("SmolLM3ForCausalLM", "smollm3")),
    (
        Style(
            qkv_bias=("attention_bias", True),
            out_bias=("attention_out_bias", False),
            feeds=_BIASED_MLP,
            head_dim=128,
        ),
        ("SeedOssForCausalLM", "seed_oss"),
    ),
    # norms without weights
    (replace(BIASED, norms=0, last_norms=0), ("OlmoForCausalLM", "olmo")),
    (replace(BIASED, qk_norms=wide_norms), ("Olmo2ForCausalLM", "olmo2")),
    (
        replace(BIASED, qk_norms=wide_norms, windows=windows.typed(4, default=4096)),
        ("Olmo3ForCausalLM", "olmo3"),
    ),
    # attention and MLP side by side behind one norm
    (
        replace(BIASED, norms=1, qk_norms=wide_norms, qk_norms_if=("use_qk_norm", False), tied=True),
        ("CohereForCausalLM", "cohere"),
    ),
    (
        replace(BIASED, norms=1, tied=True, windows=windows.typed(4, default=4096)),
        ("Cohere2ForCausalLM", "cohere2"),
    ),
    (
        Style(
            qkv_bias=("use_bias", True),
            out_bias=("use_bias", True),
            norms=4,
            last_norms=2,
            feeds=dense_feeds(gated=False, bias=("use_bias", True)),
            tied=True,
            windows=windows.same(),
        ),
        ("Starcoder2ForCausalLM", "starcoder2"),
    ),
    (
        Style(
            qkv_bias=("use_qkv_bias", False),
            last_norms=2,
            qk_norms=wide_norms,
            qk_norms_if=("qk_layernorm", False),
            # attention and MLP side by side have one LayerNorm, one after the other two
            norms=4,
            more_norms=-2,
            more_norms_if=("use_parallel_residual", False),
        ),
        ("StableLmForCausalLM", "stablelm"),
    ),
    (replace(BIASED, norms=4, last_norms=2, feeds=_TWO_BIASED), ("NemotronForCausalLM", "nemotron")),
    (
        Style(
            qkv_bias=("attention_bias", True),
            out_bias=("attention_bias", True),
            norms=4,
            last_norms=2,
            feeds=dense_feeds(gated=False, bias=("mlp_bias", True)),
        ),
        ("Jais2ForCausalLM", "jais2"),
    ),
    (Style(qk_norms=head_norms, windows=windows.typed(4, default=4096)), ("Exaone4ForCausalLM", "exaone4")),
    (
        Style(
            qkv_bias=("use_bias", False),
            out_bias=("use_bias", False),
            feeds=dense_feeds(bias=("use_bias", False)),
            head_dim=128,
            tied=True,
        ),
        ("Ernie4_5ForCausalLM", "ernie4_5"),
    ),
    (replace(BIASED, feeds=_TWO_BIASED), ("ArceeForCausalLM", "arcee")),
    (
        replace(BIASED, qk_norms=head_norms, feeds=dense_feeds(gated=False, scalars=2)),
        ("ApertusForCausalLM", "apertus"),
    ),
    (Style(qkv_bias=ATTENTION_BIAS, feeds=_BIASED_MLP, head_dim=128), ("HeliumForCausalLM", "helium")),
    (
        Style(
            head_dim=128,
            qkv_bias=("qkv_bias", False),
            out_bias=("bias", False),
            feeds=dense_feeds(bias=("bias", False)),
        ),
        ("InternLM3ForCausalLM", "internlm3"),
    ),
    # its own code has "bias" on both; wqkv and wo
    (
        Style(qkv_bias=("bias", True), out_bias=("bias", True)),
        ("InternLM2ForCausalLM", "internlm2", "InternLMForCausalLM", "internlm"),
    ),
    (Style(qkv_bias=("attention_bias", True), head_dim=128), ("GlmForCausalLM", "glm")),
    (Style(qkv_bias=("attention_bias", True), head_dim=128, norms=4), ("Glm4ForCausalLM", "glm4")),
    (Style(qkv_bias=True, norms=4), ("Glm4vForConditionalGeneration", "glm4v_text", "glm4v")),
    (
        # norms after attention and after the MLP as well
        replace(BIASED, feeds=_BIASED_MLP, more_norms=2, more_norms_if=("use_post_norm", True)),
        ("HyperCLOVAXForCausalLM", "hyperclovax"),
    ),
    (
        Style(feeds=_BIASED_MLP, windows=windows.typed(4, full=0, default=8192), head_dim=128),
        ("CwmForCausalLM", "cwm"),
    ),
    # norms without weights, of heads, too
    (replace(BIASED, norms=0, last_norms=0, feeds=_TWO_MATRICES), ("NanoChatForCausalLM", "nanochat")),
    (
        replace(BIASED, feeds=_BIASED_MLP, tied=True, sinks=True, windows=windows.typed(4, full=0, default=128)),
        ("GraniteSWAForCausalLM", "granite_swa"),
    ),
)

READERS: dict[str, Reader] = {name: reader for style, names in STYLES for reader in (decoder(style),) for name in names}
