"""From a case to a program: the ops of one decode step or one prefill chunk, layer by layer, device by device.

Equal layers of one device are one block done several times, since every layer waits for the one before it;
`merged=False` keeps the true order of layers, for traces and for checking that merging changes nothing.
"""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

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
    """`count` equal layers on one device; `index` is the first of them."""

    device: int
    kind: str
    index: int
    count: int


def split_layers(case: Case, device_count: int) -> tuple[int, ...]:
    """Device of each layer: in order, as evenly as whole layers allow, the larger shares first."""
    layers = case.model.layers
    share, larger = divmod(layers, device_count)
    sizes = [share + (device < larger) for device in range(device_count)]
    return tuple(device for device, size in enumerate(sizes) for _ in range(size))


def layer_groups(case: Case, device_count: int, *, merged: bool, alone: int = 0) -> list[LayerGroup]:
    """Layers in order of devices: merged by kind within a device (all but the first `alone`), or one by one."""
    devices = split_layers(case, device_count)
    single = [
        LayerGroup(device=device, kind=kind, index=index, count=1)
        for index, (device, kind) in enumerate(zip(devices, case.model.layer_kinds, strict=True))
    ]
    if not merged:
        return single
    groups: dict[tuple[int, str], LayerGroup] = {}
    for layer in single[alone:]:
        key = (layer.device, layer.kind)
        first = groups.get(key)
        groups[key] = replace(first, count=first.count + 1) if first else layer
    return single[:alone] + sorted(groups.values(), key=lambda group: group.device)


def decode_program(case: Case, step: Pass, device_count: int, *, merged: bool = True) -> Program:
    """One decode step: all layers, the n-gram rows beside the layer before they are needed, the hops, the head."""
    needed_at = case.model.ngram.before_layer if case.model.ngram else 0
    blocks: list[Block] = [] if needed_at else list(_blocks_of(_ngram_ops(case, step, first=0)))
    previous = 0
    for group in layer_groups(case, device_count, merged=merged, alone=needed_at):
        if group.device != previous:
            blocks.append(_hop(case, step, previous, group.device))
            previous = group.device
        weights = _weights(case, group, step)
        mixer = (
            case.layout.decode_ops(case, step, group.device, first=1)
            if group.kind == "attention"
            else _recurrence(case, step, group.device)
        )
        ops = (weights, *mixer)
        if needed_at and group.index == needed_at - 1:
            ops += _ngram_ops(case, step, first=len(ops))
        blocks.append(Block(ops=ops, times=group.count))
    blocks.append(_head(case, step, previous))
    return tuple(blocks)


def prefill_program(case: Case, chunk: Pass, device_count: int, *, merged: bool = True) -> Program:
    """One prefill chunk through all layers; logits are computed by the decode step that follows."""
    blocks: list[Block] = []
    previous = 0
    for group in layer_groups(case, device_count, merged=merged):
        if group.device != previous:
            blocks.append(_hop(case, chunk, previous, group.device))
            previous = group.device
        weights = _weights(case, group, chunk)
        if group.kind == "attention":
            blocks.append(Block(ops=(weights,), times=group.count))
            blocks.extend(case.layout.prefill_blocks(case, chunk, group.device, times=group.count))
        else:
            blocks.append(Block(ops=(weights, *_recurrence(case, chunk, group.device)), times=group.count))
    return tuple(blocks)


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
        grain=tokens,
    )


def _recurrence(case: Case, step: Pass, device: int) -> tuple[Op, ...]:
    """Recurrent state of one layer, read and written once per sequence."""
    state = Op(
        part="state",
        engine=Engine.SM,
        device=device,
        kernel=case.rules.kernel("recurrent", case.fmt.name),
        vram_bytes=2 * state_bytes(case.model, case.rules.state_element_bytes) * step.batch,
        after=(0,),
    )
    return (state,)


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
        grain=step.batch,
    )
    return Block(ops=(op,))


def _hop(case: Case, step: Pass, source: int, target: int) -> Block:
    """The residual streams of all tokens, from one device through the host to the next."""
    elements = step.rows * step.batch * case.model.residual_streams * case.model.hidden
    hop_bytes = elements * case.rules.hop_element_bytes
    down = Op(part="hop", engine=Engine.D2H, device=source, link_bytes=hop_bytes)
    up = Op(part="hop", engine=Engine.H2D, device=target, link_bytes=hop_bytes, after=(0,))
    return Block(ops=(down, up))


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
