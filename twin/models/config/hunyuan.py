"""HunYuan: norms of heads, keys and values shared by neighbouring layers, and numbers that differ by layer.

Sources: HunYuanDenseV1ForCausalLM and HunYuanMoEV1ForCausalLM of transformers 5.24; the checkpoints' own code for
`use_cla`, where only every `cla_share_factor`-th layer has keys and values.
"""

from msgspec.structs import replace

from twin.models.config.blocks import (
    EXPERTS,
    WIDTH,
    check_number,
    heads_of,
    hidden_of,
    layered,
    layers_of,
    shape_of,
    width_of,
)
from twin.models.config.decoder import ATTENTION_BIAS, head_norms, said
from twin.models.config.shape import Reader, Shape
from twin.models.fields import Fields
from twin.models.mixers import Attention
from twin.models.spec import FeedForward


def hunyuan(fields: Fields) -> Shape:
    """Dense where there is one expert, else a mixture in every layer with an MLP beside it."""
    hidden, layers = hidden_of(fields), layers_of(fields)
    own, shared = _attention(fields, hidden)
    period = fields.integer("cla_share_factor", default=1) if fields.flag("use_cla", default=False) else 1
    mixers = [shared if layer % period else own for layer in range(layers)]
    stack = layered(mixers, _feeds(fields, layers), hidden)
    return shape_of(fields, stack, hidden=hidden, vectors=hidden, tied=False)


def _attention(fields: Fields, hidden: int) -> tuple[Attention, Attention]:
    """With keys and values of its own, and with those of an earlier layer (its key norm is there, but idle)."""
    attention = heads_of(fields, hidden, head_dim=("head_dim", "attention_head_dim"))
    fields.without_effect("attention_head_dim", "norm_type", "cla_share_factor", "org_vocab_size")
    vectors = head_norms(attention) if fields.flag("use_qk_norm", default=True) else 0
    if not said(fields, ATTENTION_BIAS):
        return replace(attention, vectors=vectors), replace(attention, vectors=vectors, shares_kv=True)
    query = attention.query_heads * attention.head_dim + hidden
    own = replace(attention, vectors=vectors + query + attention.kv_elements)
    return own, replace(attention, vectors=vectors + query, shares_kv=True)


def _feeds(fields: Fields, layers: int) -> list[FeedForward]:
    width = width_of(fields)
    experts = _each(fields, "num_experts", layers, default=1, high=EXPERTS)
    if max(experts) == 1:
        fields.without_effect("moe_topk", "num_shared_expert", "moe_intermediate_size", "use_mixed_mlp_moe")
        return [FeedForward(intermediate=width)] * layers
    active = _each(fields, "moe_topk", layers, default=1, high=EXPERTS)
    of_experts = _each(fields, "moe_intermediate_size", layers, default=width, high=WIDTH)
    number = _each(fields, "num_shared_expert", layers, default=1, high=1024)
    beside = fields.flag("use_mixed_mlp_moe", default=True)
    strange = next((layer for layer in range(layers) if active[layer] > experts[layer]), None)
    if strange is not None:
        raise fields.contradiction("a token is sent to more experts than there are", "moe_topk", "num_experts")
    return [
        FeedForward(
            intermediate=of_experts[layer],
            experts=experts[layer],
            active=active[layer],
            shared_intermediate=width * number[layer] if beside else 0,
        )
        for layer in range(layers)
    ]


def _each(fields: Fields, key: str, layers: int, *, default: int, high: int) -> list[int]:
    """A number for all layers, or a list with one for each."""
    if not isinstance(fields.raw.get(key), list):
        return [fields.integer(key, default=default, high=high)] * layers
    numbers = fields.integers(key, low=1, high=high)
    check_number(fields, key, numbers, layers)
    return numbers


READERS: dict[str, Reader] = dict.fromkeys(
    (
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        "HunYuanForCausalLM",
        "HunyuanForCausalLM",
        "hunyuan",
    ),
    hunyuan,
)
