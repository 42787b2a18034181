"""Decoders with mixtures of experts and ordinary attention.

Sources: the modeling files of transformers 5.24 by the names of the classes, and of the checkpoints where it has none.
A bias of the router counts where the class has it as a parameter; most keep it as a buffer, which is none.
"""

from msgspec.structs import replace

from twin.models.config import windows
from twin.models.config.blocks import (
    HEADS,
    active_of,
    expert_count,
    heads_of,
    hidden_of,
    layered,
    layers_of,
    shape_of,
    width_of,
)
from twin.models.config.decoder import ATTENTION_BIAS, BIASED, Style, decoder, head_norms, wide_norms
from twin.models.config.experts import Routing, by_type, dense_first, qwen_dense, routed
from twin.models.config.shape import Reader, Shape
from twin.models.fields import Fields
from twin.models.spec import FeedForward

_MIXTRAL = Routing(width=("intermediate_size",))
_GLM = Routing(
    experts=("n_routed_experts", "num_experts"),
    shared_number=("n_shared_experts", "num_shared_experts"),
    dense=dense_first("first_k_dense_replace", default=1),
)
_ERNIE_BIAS = ("use_bias", False)


def _ernie_dense(fields: Fields, layers: int) -> list[bool]:
    """Experts in every `moe_layer_interval`-th layer, from one to another."""
    begin = fields.integer("moe_layer_start_index", default=1, low=0)
    end = fields.integer("moe_layer_end_index", default=-1, low=-1)
    step = fields.integer("moe_layer_interval", default=1)
    last = layers - 1 if end == -1 else end
    return [(layer + 1) % step != 0 or not begin <= layer <= last for layer in range(layers)]


def dbrx(fields: Fields) -> Shape:
    """DBRX: sizes in two tables, LayerNorms without biases."""
    hidden, layers = hidden_of(fields), layers_of(fields, "n_layers")
    attn, ffn = fields.table("attn_config"), fields.table("ffn_config")
    if attn is None or ffn is None:
        raise fields.missing("ffn_config" if attn else "attn_config")
    heads = heads_of(fields, hidden, kv_heads=())
    kv = attn.integer("kv_n_heads", default=1, high=HEADS)
    if heads.query_heads % kv:
        raise attn.wrong("kv_n_heads", f"is {kv}, of which n_heads {heads.query_heads} is no multiple")
    attention = replace(heads, kv_heads=kv)
    experts = expert_count(ffn, "moe_num_experts")
    active = active_of(ffn, experts, "moe_num_experts", "moe_top_k")
    feed = FeedForward(intermediate=width_of(ffn, "ffn_hidden_size"), experts=experts, active=active)
    attn.rest_without_effect()
    ffn.rest_without_effect()
    return shape_of(fields, layered([attention], [feed], hidden) * layers, hidden=hidden, vectors=hidden, tied=False)


_MINIMAX_M2 = decoder(
    Style(
        qk_norms=wide_norms,
        qk_norms_if=("use_qk_norm", True),
        head_dim=128,
        feeds=routed(Routing(width=("intermediate_size",))),
    )
)


def minimax_m2(fields: Fields) -> Shape:
    """MiniMax M2: full attention alone, though its file can name linear layers, too."""
    if set(fields.integers("attn_type_list", default=[])) - {1}:
        raise fields.wrong("attn_type_list", "names linear attention, which is not known of this architecture")
    kind = fields.text("qk_norm_type", default="per_layer")
    if kind != "per_layer":
        raise fields.unknown("qk_norm_type", kind, ("per_layer",))
    fields.without_effect("sliding_window")
    return _MINIMAX_M2(fields)


STYLES: tuple[tuple[Style, tuple[str, ...]], ...] = (
    (Style(windows=windows.same(), feeds=routed(_MIXTRAL)), ("MixtralForCausalLM", "mixtral")),
    (
        Style(
            qkv_bias=("qkv_bias", True),
            windows=windows.qwen,
            feeds=routed(
                Routing(shared_width=("shared_expert_intermediate_size",), shared_gate=True, dense=qwen_dense)
            ),
        ),
        ("Qwen2MoeForCausalLM", "qwen2_moe"),
    ),
    (
        replace(BIASED, qk_norms=head_norms, windows=windows.qwen, feeds=routed(Routing(dense=qwen_dense))),
        (
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            "Qwen3VLMoeForConditionalGeneration",
            "qwen3_vl_moe_text",
            "qwen3_vl_moe",
            "qwen3_omni_moe_text",
        ),
    ),
    (
        replace(
            BIASED,
            norms=4,
            last_norms=2,
            head_bias=("lm_head_bias", False),
            windows=windows.same(),
            feeds=routed(_MIXTRAL),
        ),
        ("PhimoeForCausalLM", "PhiMoEForCausalLM", "phimoe"),
    ),
    (
        Style(
            qkv_bias=("attention_bias", True),
            out_bias=("attention_bias", True),
            sinks=True,
            head_dim=64,
            windows=windows.typed(2, default=128),
            feeds=routed(
                Routing(
                    width=("intermediate_size",),
                    active=("num_experts_per_tok", "experts_per_token"),
                    router_bias=True,
                    expert_bias=True,
                )
            ),
        ),
        ("GptOssForCausalLM", "gpt_oss"),
    ),
    (replace(BIASED, feeds=routed(_MIXTRAL)), ("GraniteMoeForCausalLM", "granitemoe")),
    (
        replace(
            BIASED,
            feeds=routed(Routing(width=("intermediate_size",), shared_width=("shared_intermediate_size",))),
        ),
        ("GraniteMoeSharedForCausalLM", "granitemoeshared"),
    ),
    (
        replace(BIASED, qk_norms=wide_norms, feeds=routed(_MIXTRAL)),
        ("OlmoeForCausalLM", "olmoe", "FlexOlmoForCausalLM", "flex_olmo"),
    ),
    (
        Style(
            qkv_bias=_ERNIE_BIAS,
            out_bias=_ERNIE_BIAS,
            head_bias=_ERNIE_BIAS,
            tied=True,
            feeds=routed(
                Routing(
                    experts=("moe_num_experts",),
                    active=("moe_k",),
                    shared_number=("moe_num_shared_experts",),
                    router_bias=True,
                    bias=_ERNIE_BIAS,
                    dense=_ernie_dense,
                )
            ),
        ),
        ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    ),
    (
        Style(
            qkv_bias=ATTENTION_BIAS,
            qk_norms=head_norms,
            qk_norms_if=("use_qk_norm", False),
            feeds=routed(_GLM),
            predicts=True,
        ),
        ("Glm4MoeForCausalLM", "glm4_moe", "SarvamMoEForCausalLM", "sarvam_moe"),
    ),
    (
        Style(qkv_bias=("attention_bias", True), feeds=routed(_GLM)),
        ("Glm4vMoeForConditionalGeneration", "glm4v_moe_text", "glm4v_moe"),
    ),
    (
        replace(
            BIASED,
            qk_norms=head_norms,
            feeds=routed(
                Routing(
                    experts=("n_routed_experts",),
                    shared_number=("n_shared_experts",),
                    dense=dense_first("first_k_dense_replace", default=0),
                )
            ),
            # sliding only from layer max_window_layers on, which is their number
            windows=windows.from_layer("max_window_layers"),
        ),
        ("Dots1ForCausalLM", "dots1"),
    ),
    (
        Style(
            qk_norms=head_norms,
            windows=windows.typed(4, default=4096),
            feeds=routed(
                Routing(
                    shared_number=("num_shared_experts",),
                    dense=by_type(dense_first("first_k_dense_replace", default=1)),
                )
            ),
        ),
        ("ExaoneMoeForCausalLM", "exaone_moe"),
    ),
    (
        Style(
            qkv_bias=ATTENTION_BIAS,
            head_dim=128,
            feeds=routed(Routing(experts=("n_routed_experts",), shared_number=("n_shared_experts",))),
        ),
        ("SolarOpenForCausalLM", "solar_open"),
    ),
    (
        replace(
            BIASED,
            qk_norms=head_norms,
            head_dim=128,
            feeds=routed(
                Routing(
                    shared_number=("num_shared_experts",),
                    dense=by_type(dense_first("first_k_dense_replace", default=1)),
                    bias=("mlp_bias", False),
                )
            ),
        ),
        ("HYV3ForCausalLM", "hy_v3"),
    ),
    (
        # its own code: one product for queries, keys and values, norms of heads where the key says so
        Style(
            qkv_bias=("use_qkv_bias", False),
            out_bias=("use_bias", False),
            qk_norms=head_norms,
            qk_norms_if=("use_qk_norm", False),
            feeds=routed(
                Routing(
                    shared_number=("num_shared_experts",),
                    dense=dense_first("first_k_dense_replace", default=0),
                )
            ),
        ),
        ("BailingMoeForCausalLM", "bailing_moe", "BailingMoeV2ForCausalLM", "bailing_moe_v2"),
    ),
    (
        replace(
            BIASED,
            qk_norms=head_norms,
            norms=4,
            head_dim=128,
            output_gate=True,
            windows=windows.typed(4, default=1024, key="global_attn_every_n_layers"),
            feeds=routed(
                Routing(
                    shared_number=("num_shared_experts",),
                    router_bias=True,
                    dense=dense_first("num_dense_layers", default=1),
                )
            ),
        ),
        ("AfmoeForCausalLM", "afmoe"),
    ),
    (
        # one norm before attention and experts side by side; an MLP has a width of its own
        replace(
            BIASED,
            norms=1,
            tied=True,
            head_dim=128,
            windows=windows.typed(4, default=4096),
            feeds=routed(
                Routing(
                    width=("intermediate_size",),
                    dense_width=("prefix_dense_intermediate_size",),
                    shared_number=("num_shared_experts",),
                    dense=by_type(dense_first("first_k_dense_replace", default=0)),
                )
            ),
        ),
        ("Cohere2MoeForCausalLM", "cohere2_moe"),
    ),
    (
        replace(
            BIASED,
            qk_norms=head_norms,
            head_dim=128,
            windows=windows.typed(1, default=1024),
            feeds=routed(Routing(dense=by_type(dense_first("first_k_dense_replace", default=0)))),
        ),
        ("MellumForCausalLM", "mellum"),
    ),
    (
        replace(
            BIASED,
            sinks=True,
            windows=windows.typed(4, full=0, default=128),
            feeds=routed(Routing(width=("intermediate_size",), shared_width=("shared_intermediate_size",))),
        ),
        ("GraniteMoeSWAForCausalLM", "granitemoe_swa"),
    ),
)

READERS: dict[str, Reader] = {name: reader for style, names in STYLES for reader in (decoder(style),) for name in names}
READERS |= {"DbrxForCausalLM": dbrx, "dbrx": dbrx, "MiniMaxM2ForCausalLM": minimax_m2, "minimax_m2": minimax_m2}
