"""Mixtures of experts as configurations say them: how many, how wide, which layers have an MLP instead."""

from collections.abc import Callable

from msgspec import Struct

from twin.models.config.blocks import active_of, check_known, check_number, expert_count, present, width_of
from twin.models.config.decoder import Feeds, Said, mlp_bias, mlp_of, said
from twin.models.fields import Fields
from twin.models.spec import FeedForward

Dense = Callable[[Fields, int], list[bool]]
"""From the fields and the number of layers to whether each has an MLP instead of experts."""


class Routing(Struct, frozen=True, kw_only=True):
    """Keys of a mixture, and what an architecture adds to it."""

    experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    active: tuple[str, ...] = ("num_experts_per_tok",)
    width: tuple[str, ...] = ("moe_intermediate_size",)
    dense_width: tuple[str, ...] = ("intermediate_size",)
    shared_number: tuple[str, ...] = ()  # of shared experts as wide as the others
    shared_width: tuple[str, ...] = ()  # of all shared experts together
    shared_gate: bool = False  # one number a token, by which the shared expert counts
    router_bias: bool = False  # one number for each expert, where it is a parameter
    bias: Said = False  # on matrices of MLPs and shared experts
    expert_bias: bool = False  # on matrices of experts
    dense: Dense | None = None


def routed(routing: Routing) -> Feeds:
    """What each layer feeds forward."""

    def feeds(fields: Fields, hidden: int, layers: int) -> list[FeedForward | None]:
        dense = routing.dense(fields, layers) if routing.dense else [False] * layers
        mixture = None if all(dense) else mixture_of(fields, hidden, routing)
        mlp = mlp_of(fields, hidden, *routing.dense_width, bias=routing.bias) if any(dense) else None
        if mlp is None:
            fields.without_effect(*routing.dense_width)
        return [mlp if each else mixture for each in dense]

    return feeds


def mixture_of(fields: Fields, hidden: int, routing: Routing) -> FeedForward:
    """The experts of one layer, with what always runs beside them."""
    fields.without_effect(*routing.active, *routing.experts)  # one of several spellings is read below
    experts = expert_count(fields, *routing.experts)
    width = width_of(fields, *routing.width)
    shared = 0
    if routing.shared_width:
        shared = fields.integer(*routing.shared_width, default=0, low=0, high=2**20)
    elif routing.shared_number:
        shared = width * fields.integer(*routing.shared_number, default=0, low=0, high=1024)
    return FeedForward(
        intermediate=width,
        experts=experts,
        active=active_of(fields, experts, *present(fields, routing.experts), *routing.active),
        shared_intermediate=shared,
        vectors=(experts if routing.router_bias else 0)
        + (mlp_bias(hidden, shared) if shared and said(fields, routing.bias) else 0),
        expert_vectors=mlp_bias(hidden, width) if routing.expert_bias else 0,
        other_matrices=hidden if routing.shared_gate and shared else 0,
    )


def dense_first(key: str, *, default: int | None = None) -> Dense:
    """The first so many layers have an MLP."""

    def dense(fields: Fields, layers: int) -> list[bool]:
        number = fields.integer(key, default=default, low=0)
        if number > layers:
            raise fields.contradiction("more layers without experts than layers", key, "num_hidden_layers")
        return [layer < number for layer in range(layers)]

    return dense


def by_type(otherwise: Dense) -> Dense:
    """By `mlp_layer_types`, each "dense" or "sparse", where they are there."""

    def dense(fields: Fields, layers: int) -> list[bool]:
        types = fields.texts("mlp_layer_types", default=[])
        if not types:
            return otherwise(fields, layers)
        check_number(fields, "mlp_layer_types", types, layers)
        check_known(fields, "mlp_layer_types", types, ("dense", "sparse"))
        return [each == "dense" for each in types]

    return dense


def qwen_dense(fields: Fields, layers: int) -> list[bool]:
    """Layers that `mlp_only_layers` names, and all but every `decoder_sparse_step`-th."""
    named = set(fields.integers("mlp_only_layers", default=[]))
    step = fields.integer("decoder_sparse_step", default=1)
    if step > layers:
        raise fields.contradiction("no layer is left for its experts", "decoder_sparse_step", "num_hidden_layers")
    return [layer in named or (layer + 1) % step != 0 for layer in range(layers)]
