"""From a case to a program: the ops of one decode step or one prefill chunk, layer by layer, device by device.

Equal layers are one graph done several times, since every layer waits for the one before it and devices are alike;
`grouped=False` keeps the true order of layers, for traces and for checking that grouping changes nothing.
"""

from functools import cache

from msgspec import Struct

from twin.ask.case import Case
from twin.formats import kv_format
from twin.models.spec import Drafter
from twin.models.speculation import Speculation
from twin.operations.counts import (
    HALF_BYTES,
    elementwise_elements,
    feed_forward_active_parameters,
    feed_forward_read_parameters,
    head_bytes,
    mixer_parameters,
    parameters,
    state_bytes,
    weight_bytes,
)
from twin.operations.ops import HOST_DEVICE, Engine, Op, OpGraph, Program, Step

LOGIT_BYTES = 4
"""Bytes of one logit (fp32)."""

DISK_PAGE_BYTES = 4096
"""Least that one random read takes from a disk."""


class LayerGroup(Struct, frozen=True, kw_only=True):
    """`count` equal layers; `index` and `device` are those of the first."""

    device: int
    kind: str
    index: int
    count: int


def split_layers(case: Case, device_count: int) -> tuple[int, ...]:
    """Device of each layer: in order, as evenly as whole layers allow, the larger shares first."""
    return _split(case.model.layers, device_count)


@cache
def _split(layers: int, device_count: int) -> tuple[int, ...]:
    share, larger = divmod(layers, device_count)
    sizes = [share + (device < larger) for device in range(device_count)]
    return tuple(device for device, size in enumerate(sizes) for _ in range(size))


def layer_groups(case: Case, device_count: int, *, grouped: bool = True, alone: int = 0) -> tuple[LayerGroup, ...]:
    """Layers one by one in true order, or grouped by kind (all but the first `alone`), since devices are alike."""
    kinds = case.model.layer_kinds
    return _groups(kinds, split_layers(case, device_count), alone if grouped else len(kinds))


@cache
def _groups(kinds: tuple[str, ...], devices: tuple[int, ...], last_single: int) -> tuple[LayerGroup, ...]:
    groups = [LayerGroup(device=devices[at], kind=kinds[at], index=at, count=1) for at in range(last_single)]
    rest = kinds[last_single:]
    for kind in dict.fromkeys(rest):
        first = last_single + rest.index(kind)
        groups.append(LayerGroup(device=devices[first], kind=kind, index=first, count=rest.count(kind)))
    return tuple(groups)


# Programs of the model


def decode_program(case: Case, step: Step, device_count: int, *, grouped: bool = True) -> Program:
    """One decode step: all layers, the n-gram rows beside the layer before they are needed, the hops, the head."""
    needed_at = case.model.ngram.before_layer if case.model.ngram else 0
    graphs = [] if needed_at else list(prefetch_program(case, step))
    tokens = step.q_tokens * step.batch
    for group in layer_groups(case, device_count, grouped=grouped, alone=needed_at):
        ops = _weights(case, group, tokens)
        if group.kind == "attention":
            ops += case.layout.decode_ops(case, step, group.device, first=len(ops))
        else:
            ops += (_recurrence(case, step, group.device, after=len(ops) - 1),)
        if needed_at and group.index == needed_at - 1:
            ops += _ngram_ops(case, step, first=len(ops))
        graphs.append(OpGraph(ops=ops, times=group.count))
    graphs = _with_hops(case, step, device_count, graphs, grouped=grouped)
    return (*graphs, *head_program(case, tokens, device_count))


def prefill_program(case: Case, chunk: Step, device_count: int, *, grouped: bool = True) -> Program:
    """One prefill chunk through all layers, without logits."""
    graphs: list[OpGraph] = []
    for group in layer_groups(case, device_count, grouped=grouped):
        ops = _weights(case, group, chunk.q_tokens * chunk.batch)
        if group.kind == "attention":
            graphs.append(OpGraph(ops=ops, times=group.count))
            graphs.extend(case.layout.prefill_graphs(case, chunk, group.device, times=group.count))
        else:
            state = _recurrence(case, _last_token(chunk.batch), group.device, after=len(ops) - 1)
            graphs.append(OpGraph(ops=(*ops, state), times=group.count))
    return tuple(_with_hops(case, chunk, device_count, graphs, grouped=grouped))


def backbone_program(case: Case, tokens: int, sequences: int, device_count: int) -> Program:
    """A step without its attention: the weights' products over `tokens` tokens and the states of `sequences`."""
    graphs: list[OpGraph] = []
    for group in layer_groups(case, device_count):
        ops = _weights(case, group, tokens)
        if group.kind == "recurrent":
            ops += (_recurrence(case, _last_token(sequences), group.device, after=len(ops) - 1),)
        graphs.append(OpGraph(ops=ops, times=group.count))
    return tuple(_with_hops(case, Step(kv_tokens=0, q_tokens=tokens), device_count, graphs, grouped=True))


def prefill_attention_program(case: Case, chunk: Step, device_count: int) -> Program:
    """Attention of one prefill chunk in all layers that have it."""
    return tuple(
        graph
        for group in layer_groups(case, device_count)
        if group.kind == "attention"
        for graph in case.layout.prefill_graphs(case, chunk, group.device, times=group.count)
    )


def head_program(case: Case, tokens: int, device_count: int) -> Program:
    """Logits of `tokens` tokens, on the last device, and sampling from them where the engine's has a rate."""
    device = split_layers(case, device_count)[-1]
    ops: tuple[Op, ...] = (_linear(case, device, head_bytes(case.model), parameters(case.model).head, tokens),)
    if case.rules.samples:
        sample = Op(
            part="sampling",
            device=device,
            kernel=case.rules.kernel("sample", "fp32"),
            vram_bytes=tokens * case.model.vocab * LOGIT_BYTES,
            grain=tokens,
            after=(0,),
        )
        ops += (sample,)
    return (OpGraph(ops=ops),)


def prefetch_program(case: Case, chunk: Step) -> Program:
    """What runs beside a prefill chunk: the n-gram rows of the next one, since a prompt's tokens are known ahead."""
    ops = _ngram_ops(case, chunk, first=0)
    return (OpGraph(ops=ops),) if ops else ()


# Ops of a layer, and between layers


def _weights(case: Case, group: LayerGroup, tokens: int) -> tuple[Op, ...]:
    """All matrices of one layer: each read once per pass, 2 operations per active parameter and token.

    A chain: one op, or two where the feed-forward multiplies in an operand type of its own; then the elementwise ops
    between the products, where the rate of the products leaves them out.
    """
    model, operands = case.model, case.model.weights.mlp_operands
    mixer, active = mixer_parameters(model, group.kind), feed_forward_active_parameters(model)
    read = feed_forward_read_parameters(model, tokens)
    dense = model.feed_forward.experts == model.feed_forward.active
    device = group.device
    ops: tuple[Op, ...]
    if operands and operands != case.rules.compute_dtype:
        feed_bytes = weight_bytes(model, read)
        ops = (
            _linear(case, device, weight_bytes(model, mixer), mixer, tokens),
            _linear(case, device, feed_bytes, active, tokens, dense=dense, operands=operands, after=(0,)),
        )
    else:
        ops = (_linear(case, device, weight_bytes(model, mixer + read), mixer + active, tokens, dense=dense),)
    if not case.rules.separate_elementwise(model.weights.format):
        return ops
    elementwise = Op(
        part="elementwise",
        device=device,
        kernel=case.rules.kernel("elementwise", model.weights.format),
        vram_bytes=elementwise_elements(model, group.kind) * HALF_BYTES * tokens,
        grain=tokens,
        after=(len(ops) - 1,),
    )
    return (*ops, elementwise)


def _linear(
    case: Case,
    device: int,
    read_bytes: float,
    active: float,
    tokens: int,
    *,
    dense: bool = True,
    operands: str = "",
    after: tuple[int, ...] = (),
) -> Op:
    """Matrix products of `tokens` tokens with `active` parameters each, stored in `read_bytes` bytes.

    `dense`: other numbers of tokens read the same bytes, as they do not where each chooses its experts.
    """
    tile = case.rules.row_tiles.get(case.model.weights.format, 1)
    return Op(
        part="weights",
        device=device,
        kernel=case.linear_kernel,
        vram_bytes=read_bytes,
        flops=2.0 * active * -(-tokens // tile) * tile,
        dtype=operands or case.rules.compute_dtype,
        grain=tokens,
        row_tile=tile if dense else 0,
        after=after,
    )


def _last_token(sequences: int) -> Step:
    """As what a prefill chunk passes through a recurrence: only the state after its last token is kept."""
    return Step(kv_tokens=0, q_tokens=1, batch=sequences)


def _recurrence(case: Case, step: Step, device: int, *, after: int) -> Op:
    """Recurrent state of one layer: read once per sequence, written after each token that may turn out the last."""
    return Op(
        part="state",
        device=device,
        kernel=case.rules.kernel("recurrent", "fp32" if case.state_element_bytes > HALF_BYTES else "fp16"),
        vram_bytes=(1 + step.q_tokens) * state_bytes(case.model, case.state_element_bytes) * step.batch,
        grain=step.batch,
        after=(after,),
    )


def _with_hops(case: Case, step: Step, device_count: int, graphs: list[OpGraph], *, grouped: bool) -> list[OpGraph]:
    """The hops between devices: each where the device changes, or all of them in one graph at the end."""
    if grouped:
        crossings = split_layers(case, device_count)[-1]
        return [*graphs, _hop(case, step, 0, 1, times=crossings)] if crossings else graphs
    placed: list[OpGraph] = []
    device = 0
    for graph in graphs:
        if graph.ops[0].device != device:
            placed.append(_hop(case, step, device, graph.ops[0].device, times=1))
            device = graph.ops[0].device
        placed.append(graph)
    return placed


def _hop(case: Case, step: Step, source: int, target: int, *, times: int) -> OpGraph:
    """The residual streams of all tokens, from one device through the host to the next."""
    elements = step.q_tokens * step.batch * case.model.residual_streams * case.model.hidden
    hop_bytes = elements * case.rules.hop_element_bytes
    down = Op(part="hop", engine=Engine.D2H, device=source, link_bytes=hop_bytes)
    up = Op(part="hop", engine=Engine.H2D, device=target, link_bytes=hop_bytes, after=(0,))
    return OpGraph(ops=(down, up), times=times)


def _ngram_ops(case: Case, step: Step, *, first: int) -> tuple[Op, ...]:
    """Rows of the n-gram table: fetched from RAM, or from disk a page a row, then sent to device 0."""
    table = case.model.ngram
    if table is None:
        return ()
    rows = table.rows_per_token * step.q_tokens * step.batch
    from_disk = case.ngram == "disk"
    read_bytes = max(table.row_bytes, DISK_PAGE_BYTES) if from_disk else table.row_bytes
    fetch = Op(
        part="ngram",
        engine=Engine.DISK if from_disk else Engine.HOST,
        device=HOST_DEVICE,
        host_bytes=rows * read_bytes,
        run_bytes=read_bytes,
    )
    send = Op(part="ngram", engine=Engine.H2D, device=0, link_bytes=rows * table.row_bytes, after=(first,))
    return fetch, send


# Drafting: what proposing costs in a decode step, and what following the prompt costs in prefill


def draft_token_bytes(case: Case, drafter: Drafter) -> int:
    """Cache bytes of one token in one layer of the drafter."""
    tiled = bool(drafter.window) and case.fmt.tile_tokens > 1  # a window slides through tiles: it stays in 16 bits
    fmt = kv_format(drafter.kv_dtype or "bf16") if tiled or drafter.kv_dtype else case.fmt
    return fmt.plane_bytes(kv_heads=drafter.kv_heads, head_dim=drafter.head_dim)


def draft_weight_bytes(speculation: Speculation | None) -> float:
    """Bytes of the drafter's own weights in VRAM."""
    if speculation is None:
        return 0.0
    drafter = speculation.drafter
    return float(drafter.weight_bytes + (drafter.head_bytes if drafter.own_head else 0))


def draft_program(case: Case, speculation: Speculation, step: Step, device: int) -> Program:
    """One draft for every sequence: its passes one after the other, each through the layers and the output head.

    Beside them what a speculating step adds whatever it computes: sampling and rejection, and launches where the
    verify pass is not captured whole.
    """
    drafter = speculation.drafter
    drafting = Step(
        kv_tokens=step.kv_tokens, q_tokens=drafter.block_tokens if drafter.kind == "block" else 1, batch=step.batch
    )
    tokens = drafting.q_tokens * drafting.batch
    overheads = [case.rules.kernel("speculate", "step")]
    if case.backend in case.rules.backends.piecewise:
        overheads.append(case.rules.kernel("piecewise", "step"))
    launches = tuple(
        Op(part="launches", device=device, kernel=kernel, after=(at - 1,) if at else ())
        for at, kernel in enumerate(overheads)
    )
    head_parameters = drafter.head_bytes * 8 / (case.model.weights.head_bits or case.model.weights.bits)
    ops = (
        _draft_product(case, device, drafter.weight_bytes, drafter.parameters, tokens, after=()),
        _draft_attention(case, drafter, drafting, device, decoding=True),
        _draft_product(case, device, drafter.head_bytes, head_parameters, tokens, after=(1,)),
    )
    return OpGraph(ops=launches), OpGraph(ops=ops, times=speculation.passes)


def draft_prefill_program(case: Case, speculation: Speculation, chunk: Step, device: int) -> Program:
    """The drafter's layers over a prefill chunk, so that its cache follows the prompt."""
    drafter = speculation.drafter
    tokens = chunk.q_tokens * chunk.batch
    product = _draft_product(case, device, drafter.weight_bytes, drafter.parameters, tokens, after=())
    return (OpGraph(ops=(product, _draft_attention(case, drafter, chunk, device, decoding=False))),)


def _draft_product(
    case: Case, device: int, read_bytes: int, parameters: float, tokens: int, *, after: tuple[int, ...]
) -> Op:
    return Op(
        part="draft",
        device=device,
        kernel=case.linear_kernel,
        vram_bytes=read_bytes,
        flops=2.0 * parameters * tokens,
        dtype=case.rules.compute_dtype,
        grain=tokens,
        after=after,
    )


def _draft_attention(case: Case, drafter: Drafter, step: Step, device: int, *, decoding: bool) -> Op:
    """Attention of all the drafter's layers, over its window or the whole context."""
    kv_tokens = min(step.kv_tokens, drafter.window) if drafter.window else step.kv_tokens
    seen = kv_tokens + step.q_tokens if decoding else kv_tokens + (step.q_tokens + 1) / 2
    if drafter.window:
        seen = min(seen, drafter.window)
    if decoding:
        kernel = case.attention_kernel("attend_decode") if not drafter.window else ""
    else:
        kernel = case.attention_kernel("attend_dense")
    held = kv_tokens + step.q_tokens
    return Op(
        part="draft",
        device=device,
        kernel=kernel,
        vram_bytes=drafter.layers * held * draft_token_bytes(case, drafter) * step.batch,
        flops=4.0 * drafter.layers * drafter.query_heads * drafter.head_dim * step.q_tokens * seen * step.batch,
        dtype=case.rules.compute_dtype,
        grain=step.q_tokens if not decoding else 1,
        after=(0,),
    )
