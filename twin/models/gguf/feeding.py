"""The feed-forward of a layer, whose widths follow from its matrices alone.

Dimensions as in `src/models/` of github.com/ggml-org/llama.cpp: experts lie one behind the other in one tensor, gate
and up may be one matrix, and a dense feed-forward beside experts is one more that always runs.
"""

from twin.models.fields import Fields
from twin.models.gguf.blocks import Block
from twin.models.gguf.header import Tensor
from twin.models.spec import FeedForward

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")
ROUTER = "ffn_gate_inp"
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
BESIDE = (
    *("ffn_gate_inp_shexp", "ffn_latent_down", "ffn_latent_up", "inp_gate", "proj", "laurel_l", "laurel_r"),
    *("altup_correct_coef", "altup_predict_coef", "altup_router", "ple_key", "ple_value", "ple_conv1d"),
    *(f"hc_{half}_{which}" for half in ("attn", "ffn") for which in ("down", "up", "inject")),
)
"""Matrices that always run: gates and bottlenecks of experts, tables' rows on their way into a layer, and what mixes
several residual streams."""


def feed_forward_of(block: Block, fields: Fields, hidden: int, outside: int = 0) -> FeedForward | None:
    """The feed-forward, whose matrices and vectors it takes; `outside` parameters run with it. Raises BadFile."""
    always, beside = block.take(*_DENSE, *_SHARED), block.take(*BESIDE)
    more = sum(tensor.elements for tensor in beside.values()) + outside
    if "ffn_down_exps" in block:
        return _mixture(block, fields, hidden, always, more)
    if not always.keys() & {"ffn_down", "ffn_down_shexp"}:
        if always or more:
            names = ", ".join((*always, *beside)) or "matrices outside of layers"
            raise block.wrong(f"ffn_down is missing, beside {names}")
        return None
    gated, width = _gated(always, ""), _width(always)
    return FeedForward(
        intermediate=width,
        gated=gated,
        other_matrices=block.rest(always, (3 if gated else 2) * hidden * width) + more,
        vectors=block.take_vectors(*_DENSE),
    )


def _mixture(block: Block, fields: Fields, hidden: int, always: dict[str, Tensor], more: int) -> FeedForward:
    down = block.matrices["ffn_down_exps"]
    if len(down.dims) != 3:
        raise block.wrong(f"ffn_down_exps: {list(down.dims)}, not the matrix of each expert")
    width, own_hidden, experts = down.dims
    if fields.integer("expert_count", default=experts, high=65536) != experts:
        raise block.wrong(f"ffn_down_exps is of {experts} experts, not of expert_count {fields.raw['expert_count']}")
    taken = block.take(*EXPERTS)
    gated = _gated(taken, "_exps")
    if block.rest(taken, (3 if gated else 2) * own_hidden * width * experts):
        raise block.wrong(f"ffn_down_exps: experts of {width} x {own_hidden} contradict {', '.join(sorted(taken))}")
    router = sum(tensor.elements for tensor in block.take(ROUTER).values())
    if router != hidden * experts:
        raise block.wrong(f"{ROUTER} has {router:,} elements, not {hidden:,} for each of {experts} experts")
    shared_width = _width(always)
    own = sum(block.vectors.pop(kind, 0) for kind in EXPERTS)
    if own % experts:
        raise block.wrong(f"ffn_down_exps: {own:,} biases of {experts} experts are not as many for each")
    return FeedForward(
        intermediate=width,
        experts=experts,
        active=block.per_layer(fields, "expert_used_count"),
        shared_intermediate=shared_width,
        expert_hidden=own_hidden if own_hidden != hidden else 0,
        gated=gated,
        vectors=block.take_vectors("ffn_gate", "ffn_up", "ffn_down"),
        expert_vectors=own // experts,
        other_matrices=block.rest(always, (3 if gated else 2) * hidden * shared_width) + more,
    )


def _gated(matrices: dict[str, Tensor], which: str) -> bool:
    """Whether there is a gate: a matrix of its own, or one together with up."""
    up, down = matrices.get(f"ffn_up{which}"), matrices.get(f"ffn_down{which}")
    together = up is not None and down is not None and up.dims[1] == 2 * down.dims[0]
    return together or any(kind.startswith("ffn_gate") for kind in matrices)


def _width(matrices: dict[str, Tensor]) -> int:
    """Elements between up and down of all that always run."""
    return sum(matrices[kind].dims[0] for kind in ("ffn_down", "ffn_down_shexp") if kind in matrices)
