"""Decoders with Mamba layers: alone, in between attention, or beside it.

Sources: the modeling files of transformers 5.24, by the names of the classes; the head of Nemotron-H for a further
token is that of its checkpoint.
"""

from msgspec.structs import replace

from twin.models.config.blocks import (
    CTX,
    EXPERTS,
    HEADS,
    LAYERS,
    WIDTH,
    active_of,
    check_known,
    check_number,
    expert_count,
    heads_of,
    hidden_of,
    layer_types,
    layered,
    layers_of,
    predicting,
    shape_of,
    width_of,
)
from twin.models.config.decoder import BIASED, MLP_BIAS, attention_of, mlp_of
from twin.models.config.shape import Reader, Shape
from twin.models.fields import Fields
from twin.models.mixers import Mamba, Mamba2, Mixer
from twin.models.spec import FeedForward, Layer

NO_POSITIONS_CTX = 2**20
"""Tokens said of models without positions where the file says nothing: they have no longest context."""

_WITHOUT_EFFECT = (
    *("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "use_mambapy", "use_associative_scan"),
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_limit", "time_step_scale"),
    *("time_step_init_scheme", "residual_in_fp32", "rescale_prenorm_residual", "num_logits_to_keep"),
    *("mamba_hidden_act", "mlp_hidden_act", "z_loss_coefficient", "mamba_norm_before_gate"),
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "mlp_multipliers", "ssm_multipliers"),
    *("attention_out_multiplier", "attention_in_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)

MAMBA, ATTENTION = "mamba", "attention"
_KINDS = {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION}


def mamba(fields: Fields) -> Shape:
    """Mamba and FalconMamba: layers of the mixer alone."""
    hidden, layers = _sizes(fields)
    inner = _channels(fields, hidden, key="intermediate_size", factor="expand")
    ctx = fields.integer(*CTX, default=NO_POSITIONS_CTX)
    mixer = mamba1_of(fields, hidden, inner, prefix="", state="state_size", kernel="conv_kernel")
    layer = Layer(mixers=(mixer,), vectors=hidden)
    return shape_of(fields, [layer] * layers, hidden=hidden, vectors=hidden, tied=True, ctx=ctx)


def mamba2(fields: Fields) -> Shape:
    """Mamba-2: layers of the mixer alone."""
    hidden, layers = _sizes(fields)
    bias = fields.flag("use_bias", default=False)
    ctx = fields.integer(*CTX, default=NO_POSITIONS_CTX)
    fields.without_effect("time_step_rank", "intermediate_size")
    mixer = mamba2_of(
        fields,
        hidden,
        inner=_channels(fields, hidden, factor="expand"),
        names=("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
        conv_bias=fields.flag("use_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
    )
    layer = Layer(mixers=(mixer,), vectors=hidden)
    return shape_of(fields, [layer] * layers, hidden=hidden, vectors=hidden, tied=False, ctx=ctx)


def jamba(fields: Fields) -> Shape:
    """Jamba: attention in every so many layers, experts in every so many, Mamba with norms of what is selective."""
    hidden, layers = _sizes(fields)
    attention = heads_of(fields, hidden)
    recurrent = mamba1_of(fields, hidden, _channels(fields, hidden), normed=True)
    dense = FeedForward(intermediate=width_of(fields))
    experts = expert_count(fields, "num_experts")
    sparse = dense
    fields.without_effect("num_experts_per_tok")
    if experts > 1:
        active = active_of(fields, experts, "num_experts")
        sparse = FeedForward(intermediate=dense.intermediate, experts=experts, active=active)
    attends, routes = _periodic(fields, "attn_layer", layers), _periodic(fields, "expert_layer", layers)
    mixers = [attention if layer in attends else recurrent for layer in range(layers)]
    stack = layered(mixers, [sparse if layer in routes else dense for layer in range(layers)], hidden)
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=False)


def bamba(fields: Fields) -> Shape:
    """Bamba: Mamba-2, and attention in the layers that are listed."""
    hidden, layers = _sizes(fields)
    listed = set(fields.integers("attn_layer_indices", default=[], high=layers - 1))
    kinds = [ATTENTION if layer in listed else MAMBA for layer in range(layers)]
    return _alternating(fields, hidden, kinds, mlp_of(fields, hidden, bias=MLP_BIAS))


def granite_hybrid(fields: Fields) -> Shape:
    """Granite 4: Mamba-2 and attention by a list, experts beside a feed-forward that always runs, or that alone."""
    hidden, layers = _sizes(fields)
    keys = ("layer_types", "layers_block_type")
    kinds = [_KINDS[kind] for kind in layer_types(fields, layers, None, known=_KINDS, keys=keys)]
    shared = width_of(fields, "shared_intermediate_size")
    feed = FeedForward(intermediate=shared)
    experts = fields.integer("num_local_experts", default=0, low=0, high=EXPERTS)
    if not experts:
        fields.without_effect("intermediate_size", "num_experts_per_tok")
    else:
        active = active_of(fields, experts, "num_local_experts")
        feed = FeedForward(intermediate=width_of(fields), experts=experts, active=active, shared_intermediate=shared)
    return _alternating(fields, hidden, kinds, feed)


def falcon_h1(fields: Fields) -> Shape:
    """Falcon-H1: in each layer attention and Mamba-2 side by side."""
    hidden, layers = _sizes(fields)
    recurrent = mamba2_of(
        fields,
        hidden,
        inner=_channels(fields, hidden, key="mamba_d_ssm"),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        in_bias=fields.flag("mamba_proj_bias", default=False),
        out_bias=fields.flag("projectors_bias", default=False),
        normed=fields.flag("mamba_rms_norm", default=False),
    )
    attention = attention_of(fields, hidden, BIASED)
    layer = Layer(mixers=(attention, recurrent), feed_forward=mlp_of(fields, hidden, bias=MLP_BIAS), vectors=2 * hidden)
    return shape_of(fields, [layer] * layers, hidden=hidden, vectors=hidden, tied=False)


_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(fields: Fields) -> Shape:
    """Nemotron-H and Nemotron 3: a layer is Mamba-2, attention, a feed-forward or experts, and one of them alone."""
    fields.without_effect(*_WITHOUT_EFFECT)
    hidden = hidden_of(fields)
    kinds = _nemotron_kinds(fields)
    fields.without_effect(
        "intermediate_size", "moe_intermediate_size", "num_experts_per_tok"
    )  # unless a layer has them
    made = {kind: _nemotron_layer(fields, hidden, kind) for kind in dict.fromkeys(kinds)}
    return shape_of(
        fields,
        [made[kind] for kind in kinds],
        hidden=hidden,
        vectors=hidden,
        tied=False,
        towers=_nemotron_mtp(fields, hidden),
    )


def _nemotron_mtp(fields: Fields, hidden: int) -> dict[str, int]:
    """Heads for further tokens, of layers by their own pattern."""
    if not fields.integer("num_nextn_predict_layers", default=0, low=0, high=64):
        fields.without_effect("mtp_hybrid_override_pattern", "mtp_layers_block_type")
        return {}
    kinds = _listed(fields, "mtp_layers_block_type") or _spelled(fields, "mtp_hybrid_override_pattern", "*E")
    return predicting(fields, [_nemotron_layer(fields, hidden, kind) for kind in kinds], hidden)


def _nemotron_kinds(fields: Fields) -> list[str]:
    key = "layers_block_type" if "layers_block_type" in fields else "layer_types"
    kinds = _listed(fields, key) or _spelled(fields, "hybrid_override_pattern", None)
    told = key if key in fields else "hybrid_override_pattern"
    check_number(fields, told, kinds, fields.integer("num_hidden_layers", default=len(kinds), high=LAYERS))
    return kinds


def _listed(fields: Fields, key: str) -> list[str]:
    if key not in fields:
        return []
    kinds = [_KINDS.get(kind, kind) for kind in fields.texts(key)]
    check_known(fields, key, kinds, _PATTERN.values())
    return kinds


def _spelled(fields: Fields, key: str, default: str | None) -> list[str]:
    letters = fields.text(key, default=default)
    check_known(fields, key, letters, _PATTERN)
    return [_PATTERN[letter] for letter in letters]


def _nemotron_layer(fields: Fields, hidden: int, kind: str) -> Layer:
    if kind in ("mlp", "moe"):
        feed = (
            _nemotron_experts(fields, hidden) if kind == "moe" else mlp_of(fields, hidden, gated=False, bias=MLP_BIAS)
        )
        return Layer(feed_forward=feed, vectors=hidden)
    return Layer(mixers=(_nemotron_mixer(fields, hidden, kind),), vectors=hidden)


def _nemotron_mixer(fields: Fields, hidden: int, kind: str) -> Mixer:
    if kind == ATTENTION:
        fields.only("attention_bias", expected=False)
        return heads_of(fields, hidden, head_dim=("head_dim", "attention_head_dim"))
    heads, head_dim = fields.integer("mamba_num_heads", high=HEADS), fields.integer("mamba_head_dim", high=WIDTH)
    fields.without_effect("expand", "mamba_expand", "mamba_proj_bias", "time_step_rank")
    bias = fields.flag("use_bias", default=False)
    return mamba2_of(
        fields,
        hidden,
        inner=heads * head_dim,
        names=("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
        conv_bias=fields.flag("use_conv_bias", "mamba_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
    )


def _nemotron_experts(fields: Fields, hidden: int) -> FeedForward:
    """Experts of two matrices, in a narrower space where `moe_latent_size` says so, and one that always runs."""
    experts = expert_count(fields, "n_routed_experts")
    active = active_of(fields, experts, "n_routed_experts")
    always = mlp_of(fields, hidden, "moe_shared_expert_intermediate_size", gated=False, bias=MLP_BIAS)
    latent = fields.integer("moe_latent_size", default=0, low=0, high=WIDTH)
    fields.without_effect("n_shared_experts", "moe_shared_expert_overlap")
    biases = latent + hidden if latent and always.vectors else 0
    return FeedForward(
        intermediate=width_of(fields, "moe_intermediate_size"),
        experts=experts,
        active=active,
        shared_intermediate=always.intermediate,
        expert_hidden=latent,
        gated=False,
        vectors=always.vectors + biases,
        other_matrices=2 * hidden * latent,
    )


def _alternating(fields: Fields, hidden: int, kinds: list[str], feed: FeedForward) -> Shape:
    """Layers of Mamba-2 or attention, all with the same feed-forward."""
    bias = fields.flag("mamba_proj_bias", default=False)
    recurrent = mamba2_of(
        fields,
        hidden,
        inner=_channels(fields, hidden),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
    )
    mixers: dict[str, Mixer] = {MAMBA: recurrent, ATTENTION: attention_of(fields, hidden, BIASED)}
    stack = layered([mixers[kind] for kind in kinds], [feed] * len(kinds), hidden)
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=False)


def mamba1_of(
    fields: Fields,
    hidden: int,
    inner: int,
    *,
    prefix: str = "mamba_",
    state: str = "mamba_d_state",
    kernel: str = "mamba_d_conv",
    normed: bool = False,
) -> Mamba:
    """Mamba; `normed`: norms of the time step and of B and C. The time step's bias and D are vectors."""
    rank_key = "mamba_dt_rank" if prefix else "time_step_rank"
    automatic = -(-hidden // 16)
    rank = automatic if _automatic(fields, rank_key) else fields.integer(rank_key, high=WIDTH)
    states = fields.integer(state, high=WIDTH)
    conv_bias = fields.flag("mamba_conv_bias" if prefix else "use_conv_bias", default=True)
    bias = fields.flag("mamba_proj_bias" if prefix else "use_bias", default=False)
    return Mamba(
        inner=inner,
        state=states,
        conv_kernel=fields.integer(kernel, low=2, high=64),
        time_rank=rank,
        vectors=2 * inner
        + (inner if conv_bias else 0)
        + (2 * inner + hidden if bias else 0)
        + (rank + 2 * states if normed else 0),
    )


def mamba2_of(
    fields: Fields,
    hidden: int,
    *,
    inner: int,
    conv_bias: bool,
    in_bias: bool,
    out_bias: bool,
    names: tuple[str, str, str, str, str] = (
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_conv",
    ),
    normed: bool = True,
) -> Mamba2:
    """Mamba-2 by the names of heads, their width, groups, states and the convolution's taps.

    Time steps' biases, decays and D of each head are vectors, and a norm of what goes out.
    """
    heads = fields.integer(names[0], high=HEADS)
    head_dim = inner // heads if _automatic(fields, names[1]) else fields.integer(names[1], high=WIDTH)
    if heads * head_dim != inner:
        raise fields.contradiction(f"the heads have {heads * head_dim} channels, not {inner}", names[0], names[1])
    mixer = Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=fields.integer(names[2], high=HEADS),
        state=fields.integer(names[3], high=WIDTH),
        conv_kernel=fields.integer(names[4], low=2, high=64),
    )
    if heads % mixer.groups:
        raise fields.contradiction("heads are no multiple of groups", names[0], names[2])
    projected = inner + mixer.conv_channels + heads
    return replace(
        mixer,
        vectors=3 * heads
        + (mixer.conv_channels if conv_bias else 0)
        + (inner if normed else 0)
        + (projected if in_bias else 0)
        + (hidden if out_bias else 0),
    )


def _sizes(fields: Fields) -> tuple[int, int]:
    """Width and layers."""
    fields.without_effect(*_WITHOUT_EFFECT)
    return hidden_of(fields), layers_of(fields)


def _automatic(fields: Fields, key: str) -> bool:
    """Whether a size is said to follow from others."""
    if fields.raw.get(key, "auto") != "auto":
        return False
    fields.without_effect(key)
    return True


def _channels(fields: Fields, hidden: int, *, key: str | None = None, factor: str = "mamba_expand") -> int:
    """Mamba's channels: as the key says, else so many times the width."""
    if key is None or key not in fields:
        return fields.integer(factor, high=64) * hidden
    fields.without_effect(factor)
    return fields.integer(key, high=WIDTH)


def _periodic(fields: Fields, name: str, layers: int) -> set[int]:
    """Layers that are `offset` after a multiple of `period`."""
    period, offset = fields.integer(f"{name}_period"), fields.integer(f"{name}_offset", low=0)
    if offset >= period:
        raise fields.contradiction("the offset is below the period", f"{name}_offset", f"{name}_period")
    return set(range(offset, layers, period))


READERS: dict[str, Reader] = {
    "MambaForCausalLM": mamba,
    "mamba": mamba,
    "FalconMambaForCausalLM": mamba,
    "falcon_mamba": mamba,
    "Mamba2ForCausalLM": mamba2,
    "mamba2": mamba2,
    "JambaForCausalLM": jamba,
    "jamba": jamba,
    "BambaForCausalLM": bamba,
    "bamba": bamba,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "granitemoehybrid": granite_hybrid,
    "FalconH1ForCausalLM": falcon_h1,
    "falcon_h1": falcon_h1,
    "NemotronHForCausalLM": nemotron_h,
    "nemotron_h": nemotron_h,
}
