"""From a case to a program: the ops of one decode step or one prefill chunk, layer by layer, device by device.

Equal layers are one block done several times, since every layer waits for the one before it and devices are alike;
`merged=False` keeps the true order of layers, for traces and for checking that merging changes nothing.
"""

from collections.abc import Iterator
from functools import cache

from msgspec import Struct

from twin.ask.case import Case
from twin.layouts.layout import Pass
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
from twin.operations.ops import HOST_DEVICE, Block, Engine, Op, Program

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


def layer_groups(case: Case, device_count: int, *, merged: bool, alone: int = 0) -> tuple[LayerGroup, ...]:
    """Layers one by one in true order, or merged by kind (all but the first `alone`), since devices are alike."""
    kinds = case.model.layer_kinds
    return _groups(kinds, split_layers(case, device_count), alone if merged else len(kinds))


@cache
def _groups(kinds: tuple[str, ...], devices: tuple[int, ...], last_single: int) -> tuple[LayerGroup, ...]:
    groups = [LayerGroup(device=devices[at], kind=kinds[at], index=at, count=1) for at in range(last_single)]
    rest = kinds[last_single:]
    for kind in dict.fromkeys(rest):
        first = last_single + rest.index(kind)
        groups.append(LayerGroup(device=devices[first], kind=kind, index=first, count=rest.count(kind)))
    return tuple(groups)


def decode_program(case: Case, step: Pass, device_count: int, *, merged: bool = True) -> Program:
    """One decode step: all layers, the n-gram rows beside the layer before they are needed, the hops, the head."""
    needed_at = case.model.ngram.before_layer if case.model.ngram else 0
    blocks: list[Block] = [] if needed_at else list(_blocks_of(_ngram_ops(case, step, first=0)))
    tokens = step.rows * step.batch
    for group in layer_groups(case, device_count, merged=merged, alone=needed_at):
        weights = _weights(case, group, tokens)
        first = len(weights)
        mixer = (
            case.layout.decode_ops(case, step, group.device, first=first)
            if group.kind == "attention"
            else (_recurrence(case, step, group.device, after=first - 1),)
        )
        ops = (*weights, *mixer)
        if needed_at and group.index == needed_at - 1:
            ops += _ngram_ops(case, step, first=len(ops))
        blocks.append(Block(ops=ops, times=group.count))
    blocks = _with_hops(case, step, device_count, blocks, merged=merged)
    blocks.extend(head_program(case, tokens, device_count))
    return tuple(blocks)


def prefill_program(case: Case, chunk: Pass, device_count: int, *, merged: bool = True) -> Program:
    """One prefill chunk through all layers, without logits."""
    blocks: list[Block] = []
    for group in layer_groups(case, device_count, merged=merged):
        weights = _weights(case, group, chunk.rows * chunk.batch)
        if group.kind == "attention":
            blocks.append(Block(ops=weights, times=group.count))
            blocks.extend(case.layout.prefill_blocks(case, chunk, group.device, times=group.count))
        else:
            state = _recurrence(case, Pass(past=0, rows=1, batch=chunk.batch), group.device, after=len(weights) - 1)
            blocks.append(Block(ops=(*weights, state), times=group.count))
    return tuple(_with_hops(case, chunk, device_count, blocks, merged=merged))


def backbone_program(case: Case, tokens: int, sequences: int, device_count: int) -> Program:
    """A step without its attention: the weights' products over `tokens` tokens and the states of `sequences`."""
    blocks: list[Block] = []
    state = Pass(past=0, rows=1, batch=sequences)
    for group in layer_groups(case, device_count, merged=True):
        ops = _weights(case, group, tokens)
        if group.kind == "recurrent":
            ops += (_recurrence(case, state, group.device, after=len(ops) - 1),)
        blocks.append(Block(ops=ops, times=group.count))
    return tuple(_with_hops(case, Pass(past=0, rows=tokens), device_count, blocks, merged=True))


def prefill_attention_program(case: Case, chunk: Pass, device_count: int) -> Program:
    """Attention of one prefill chunk in all layers that have it."""
    groups = layer_groups(case, device_count, merged=True)
    found = [
        case.layout.prefill_blocks(case, chunk, group.device, times=group.count)
        for group in groups
        if group.kind == "attention"
    ]
    return tuple(block for blocks in found for block in blocks)


def _with_hops(case: Case, step: Pass, device_count: int, blocks: list[Block], *, merged: bool) -> list[Block]:
    """The hops between devices: each where the device changes, or all of them in one block at the end."""
    if merged:
        crossings = split_layers(case, device_count)[-1]
        return [*blocks, _hop(case, step, 0, 1, times=crossings)] if crossings else blocks
    placed: list[Block] = []
    device = 0
    for block in blocks:
        if block.ops[0].device != device:
            placed.append(_hop(case, step, device, block.ops[0].device, times=1))
            device = block.ops[0].device
        placed.append(block)
    return placed


def prefetch_program(case: Case, chunk: Pass) -> Program:
    """What runs beside a prefill chunk: the n-gram rows of the next one, since a prompt's tokens are known ahead."""
    return tuple(_blocks_of(_ngram_ops(case, chunk, first=0)))


def _blocks_of(ops: tuple[Op, ...]) -> Iterator[Block]:
    if ops:
        yield Block(ops=ops)


def _weights(case: Case, group: LayerGroup, tokens: int) -> tuple[Op, ...]:
    """All matrices of one layer: each read once per pass, 2 operations per active parameter and token.

    A chain: one op, or two where the feed-forward multiplies in an operand type of its own; then what lies between the
    products, where their rate leaves it out.
    """
    model, operands = case.model, case.model.weights.mlp_operands
    mixer, active = mixer_parameters(model, group.kind), feed_forward_active_parameters(model)
    read = feed_forward_read_parameters(model, tokens)
    dense = model.feed_forward.experts == model.feed_forward.active
    ops: tuple[Op, ...]
    if operands and operands != case.rules.compute_dtype:
        ops = (
            _linear(case, group.device, weight_bytes(model, mixer), mixer, tokens),
            _linear(
                case,
                group.device,
                weight_bytes(model, read),
                active,
                tokens,
                dense=dense,
                operands=operands,
                after=(0,),
            ),
        )
    else:
        ops = (_linear(case, group.device, weight_bytes(model, mixer + read), mixer + active, tokens, dense=dense),)
    if model.weights.format not in case.rules.glue_apart:
        return ops
    glue = Op(
        part="elementwise",
        engine=Engine.SM,
        device=group.device,
        kernel=case.rules.kernel("elementwise", model.weights.format),
        vram_bytes=elementwise_elements(model, group.kind) * HALF_BYTES * tokens,
        grain=tokens,
        after=(len(ops) - 1,),
    )
    return (*ops, glue)


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
        engine=Engine.SM,
        device=device,
        kernel=case.linear_kernel,
        vram_bytes=read_bytes,
        flops=2.0 * active * -(-tokens // tile) * tile,
        dtype=operands or case.rules.compute_dtype,
        grain=tokens,
        row_tile=tile if dense else 0,
        after=after,
    )


def _recurrence(case: Case, step: Pass, device: int, *, after: int) -> Op:
    """Recurrent state of one layer: read once per sequence, written after each token that may turn out the last.

    A prefill chunk keeps only the state after its end, so it passes as a step of one token.
    """
    return Op(
        part="state",
        engine=Engine.SM,
        device=device,
        kernel=case.rules.kernel("recurrent", "fp32" if case.state_element_bytes > HALF_BYTES else "fp16"),
        vram_bytes=(1 + step.rows) * state_bytes(case.model, case.state_element_bytes) * step.batch,
        grain=step.batch,
        after=(after,),
    )


def head_program(case: Case, tokens: int, device_count: int) -> Program:
    """Logits of `tokens` tokens, on the last device, and sampling from them where the engine's has a rate."""
    device = split_layers(case, device_count)[-1]
    counts = parameters(case.model)
    ops: tuple[Op, ...] = (_linear(case, device, head_bytes(case.model), counts.head, tokens),)
    if case.rules.samples:
        ops += (_sampling(case, tokens, device),)
    return (Block(ops=ops),)


def _sampling(case: Case, tokens: int, device: int) -> Op:
    """One token from each row of fp32 logits."""
    return Op(
        part="sampling",
        engine=Engine.SM,
        device=device,
        kernel=case.rules.kernel("sample", "fp32"),
        vram_bytes=tokens * case.model.vocab * LOGIT_BYTES,
        grain=tokens,
        after=(0,),
    )


def _hop(case: Case, step: Pass, source: int, target: int, *, times: int) -> Block:
    """The residual streams of all tokens, from one device through the host to the next."""
    elements = step.rows * step.batch * case.model.residual_streams * case.model.hidden
    hop_bytes = elements * case.rules.hop_element_bytes
    down = Op(part="hop", engine=Engine.D2H, device=source, link_bytes=hop_bytes)
    up = Op(part="hop", engine=Engine.H2D, device=target, link_bytes=hop_bytes, after=(0,))
    return Block(ops=(down, up), times=times)


def _ngram_ops(case: Case, step: Pass, *, first: int) -> tuple[Op, ...]:
    """Rows of the n-gram table: fetched from RAM, or from disk a page a row, then sent to device 0."""
    table = case.model.ngram
    if table is None:
        return ()
    rows = table.rows_per_token * step.rows * step.batch
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
