"""From a case to a program: the ops of one decode step or one prefill chunk, layer by layer, device by device.

Equal layers are one block done several times, since every layer waits for the one before it and devices are alike;
`merged=False` keeps the true order of layers, for traces and for checking that merging changes nothing.
"""

from collections.abc import Iterator
from functools import cache

from msgspec import Struct

from twin.case import Case
from twin.counts import (
    layer_active_parameters,
    layer_read_parameters,
    parameters,
    state_bytes,
    weight_bytes,
)
from twin.layouts.layout import Pass
from twin.ops import HOST_DEVICE, Block, Engine, Op, Program

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
    for group in layer_groups(case, device_count, merged=merged, alone=needed_at):
        mixer = (
            case.layout.decode_ops(case, step, group.device, first=1)
            if group.kind == "attention"
            else (_recurrence(case, step, group.device),)
        )
        ops = (_weights(case, group, step), *mixer)
        if needed_at and group.index == needed_at - 1:
            ops += _ngram_ops(case, step, first=len(ops))
        blocks.append(Block(ops=ops, times=group.count))
    blocks = _with_hops(case, step, device_count, blocks, merged=merged)
    blocks.append(_head(case, step, split_layers(case, device_count)[-1]))
    return tuple(blocks)


def prefill_program(case: Case, chunk: Pass, device_count: int, *, merged: bool = True) -> Program:
    """One prefill chunk through all layers; logits are computed by the decode step that follows."""
    blocks: list[Block] = []
    for group in layer_groups(case, device_count, merged=merged):
        weights = _weights(case, group, chunk)
        if group.kind == "attention":
            blocks.append(Block(ops=(weights,), times=group.count))
            blocks.extend(case.layout.prefill_blocks(case, chunk, group.device, times=group.count))
        else:
            blocks.append(Block(ops=(weights, _recurrence(case, chunk, group.device)), times=group.count))
    return tuple(_with_hops(case, chunk, device_count, blocks, merged=merged))


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


def _weights(case: Case, group: LayerGroup, step: Pass) -> Op:
    """All matrices of one layer: each read once per pass, 2 operations per active parameter and token."""
    tokens = step.rows * step.batch
    return Op(
        part="weights",
        engine=Engine.SM,
        device=group.device,
        kernel=case.rules.kernel("linear", case.model.weights.format),
        vram_bytes=weight_bytes(case.model, layer_read_parameters(case.model, group.kind, tokens)),
        flops=2.0 * layer_active_parameters(case.model, group.kind) * tokens,
        dtype=case.rules.compute_dtype,
        grain=tokens,
    )


def _recurrence(case: Case, step: Pass, device: int) -> Op:
    """Recurrent state of one layer, read and written once per sequence."""
    return Op(
        part="state",
        engine=Engine.SM,
        device=device,
        kernel=case.rules.kernel("recurrent", case.fmt.name),
        vram_bytes=2 * state_bytes(case.model, case.rules.state_element_bytes) * step.batch,
        after=(0,),
    )


def _head(case: Case, step: Pass, device: int) -> Block:
    """Logits of the last token of each sequence."""
    head = parameters(case.model).head
    op = Op(
        part="weights",
        engine=Engine.SM,
        device=device,
        kernel=case.rules.kernel("linear", case.model.weights.format),
        vram_bytes=weight_bytes(case.model, head),
        flops=2.0 * head * step.batch,
        dtype=case.rules.compute_dtype,
        grain=step.batch,
    )
    return Block(ops=(op,))


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
