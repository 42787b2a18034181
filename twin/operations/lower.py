"""From a case to a program: the ops of one decode step or one prefill chunk, layer by layer, device by device.

Equal layers are one graph done several times, since every layer waits for the one before it and devices are alike;
`grouped=False` keeps the true order of layers, for traces and for checking that grouping changes nothing.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles.profile import Split
from twin.ask.case import Case
from twin.formats import kv_format
from twin.models.mixers import Attending, Attention, GatedDeltaNet, LatentAttention, Recurrent, mixer_tag
from twin.models.spec import Drafter, Layer, Part
from twin.models.speculation import Speculation
from twin.operations import counts, latent
from twin.operations.collectives import draft_sums, embedding_program, gathered_logits, layer_sums
from twin.operations.counts import HALF_BYTES
from twin.operations.ops import HOST_DEVICE, Engine, Op, OpGraph, Program, Step
from twin.operations.processor import chained, comes_up, from_host, on_processor, products

LOGIT_BYTES = 4  # bytes of one logit (fp32)
_PARTS: tuple[Part, ...] = ("attention", "router", "experts", "feed_forward")  # of a layer, those that are matrices

DISK_PAGE_BYTES = 4096  # least that one random read takes from a disk


class LayerGroup(Struct, frozen=True, kw_only=True):
    """`count` equal layers; `index` and `device` are those of the first."""

    device: int  # or HOST_DEVICE, where the processor runs them
    kind: str
    index: int
    count: int
    cpu_experts: bool = False  # whether the processor has their experts


@cache
def split_layers(layers: int, split: Split) -> tuple[int, ...]:
    """Device of each layer: in order, as evenly as whole layers allow, the larger shares first.

    Over devices of several kinds as near to the shares of their memory as whole layers come.
    """
    if isinstance(split, int):
        share, larger = divmod(layers, split)
        sizes = [share + (device < larger) for device in range(split)]
    else:
        ends = [round(layers * sum(split[: device + 1]) / sum(split)) for device in range(len(split))]
        sizes = [end - begin for begin, end in pairwise((0, *ends))]
    return tuple(device for device, size in enumerate(sizes) for _ in range(size))


def placed_layers(case: Case, split: Split) -> tuple[int, ...]:
    """Device of each layer: the first of them are the processor's where the question leaves them to it.

    llama.cpp deals the output out with the layers, as one more after the last (`src/llama-model.cpp`, `load_tensors`).
    """
    cpu_layers, layers = case.cpu_layers, case.model.layers - case.cpu_layers
    if case.rules.cells is None:
        return split_layers(layers, split)
    if isinstance(split, int):
        return (HOST_DEVICE,) * cpu_layers + tuple(at * split // (layers + 1) for at in range(layers))
    return (HOST_DEVICE,) * cpu_layers + split_layers(layers + 1, split)[:layers]


@cache
def layer_groups(
    kinds: tuple[str, ...], devices: tuple[int, ...], *, alone: int = 0, cpu_experts: int = 0, apart: bool = False
) -> tuple[LayerGroup, ...]:
    """The first `alone` layers one by one in true order, the others grouped by kind, and `apart` by device, too."""
    cpu_layers = devices.count(HOST_DEVICE)
    marked = [
        (kind, at < cpu_layers, cpu_layers <= at < cpu_experts, devices[at] if apart else 0)
        for at, kind in enumerate(kinds)
    ]
    rest = marked[alone:]
    firsts = [(at, 1) for at in range(alone)]
    firsts += [(alone + rest.index(mark), rest.count(mark)) for mark in dict.fromkeys(rest)]
    return tuple(
        LayerGroup(device=devices[at], kind=kinds[at], index=at, count=count, cpu_experts=marked[at][2])
        for at, count in firsts
    )


def _groups(case: Case, split: Split, *, alone: int = 0) -> tuple[LayerGroup, ...]:
    """Layers as the devices have them, which are alike unless `split` says otherwise."""
    experts, apart = case.question.cpu_experts, not isinstance(split, int)
    devices = placed_layers(case, split)
    return layer_groups(case.model.layer_kinds, devices, alone=alone, cpu_experts=experts, apart=apart)


# Programs of the model


def decode_program(case: Case, step: Step, split: Split, *, grouped: bool = True) -> Program:
    """One decode step: all layers, the n-gram rows beside the layer before they are needed, the hops, the head."""
    needed_at = case.model.ngram.before_layer if case.model.ngram else 0
    graphs = [] if needed_at else list(prefetch_program(case, step))
    tokens = step.q_tokens * step.batch
    graphs += embedding_program(case, tokens)
    for group in _groups(case, split, alone=needed_at if grouped else case.model.layers):
        layer = case.model.kinds[group.kind]
        ops = _weights(case, layer, group, tokens)
        for mixer in layer.mixers:
            if isinstance(mixer, Attending):
                ops += _decode_ops(case.of(mixer), step, group.device, first=len(ops))
            else:
                ops += (_recurrence(case, mixer, step, group.device, after=len(ops) - 1),)
        ops += layer_sums(case, layer, group.device, tokens, after=len(ops) - 1)
        if needed_at and group.index == needed_at - 1:
            ops += _ngram_ops(case, step, first=len(ops))
        graphs.append(OpGraph(ops=ops, times=group.count))
    graphs = _with_hops(case, tokens, split, graphs, grouped=grouped)
    return (*graphs, *head_program(case, tokens, split))


def prefill_program(case: Case, chunk: Step, split: Split, *, grouped: bool = True) -> Program:
    """One prefill chunk through all layers, without logits."""
    tokens = chunk.q_tokens * chunk.batch
    return backbone_program(case, tokens, chunk.batch, split, chunk=chunk, grouped=grouped)


def backbone_program(
    case: Case, tokens: int, sequences: int, split: Split, *, chunk: Step | None = None, grouped: bool = True
) -> Program:
    """Products over `tokens` tokens, states of `sequences` after their last; attention of a `chunk` alone."""
    graphs = list(embedding_program(case, tokens))
    last_token = Step(kv_tokens=0, q_tokens=1, batch=sequences)
    for group in _groups(case, split, alone=0 if grouped else case.model.layers):
        layer = case.model.kinds[group.kind]
        ops = _weights(case, layer, group, tokens)
        for mixer in layer.recurrent:
            ops += (_recurrence(case, mixer, last_token, group.device, after=len(ops) - 1),)
        ops += layer_sums(case, layer, group.device, tokens, after=len(ops) - 1)
        graphs.append(OpGraph(ops=ops, times=group.count))
        if chunk is not None:
            graphs.extend(_prefill_graphs(case, chunk, group))
    return tuple(_with_hops(case, tokens, split, graphs, grouped=grouped))


def prefill_attention_program(case: Case, chunk: Step, split: Split) -> Program:
    """Attention of one prefill chunk in all layers that have it."""
    return tuple(graph for group in _groups(case, split) for graph in _prefill_graphs(case, chunk, group))


def _seen(mixer: Attending, step: Step) -> Step:
    """The step as that attention sees it."""
    if isinstance(mixer, Attention) and mixer.window:
        return step.within_window(mixer.window)
    if isinstance(mixer, Attention) and mixer.local_chunk:
        return step.within_chunk(mixer.local_chunk)
    return step


def _decode_ops(case: Case, step: Step, device: int, *, first: int) -> tuple[Op, ...]:
    """Attention of one decode step in one layer, a chain after op `first` - 1."""
    mixer = case.mixer
    if isinstance(mixer, LatentAttention):
        ops = latent.decode_ops(case, mixer, step, device, first=first)
    else:
        ops = case.layout.decode_ops(case, _seen(case.attention, step), device, first=first)
    return tuple(on_processor(case, op) for op in ops) if device == HOST_DEVICE else ops


def _prefill_graphs(case: Case, chunk: Step, group: LayerGroup) -> Iterator[OpGraph]:
    """Attention of one prefill chunk in the layers of a group."""
    for mixer in case.model.kinds[group.kind].attending:
        own = case.of(mixer)
        if isinstance(mixer, LatentAttention):
            ops = latent.prefill_ops(own, mixer, chunk, group.device)
            graphs: Sequence[OpGraph] = (OpGraph(ops=ops, times=group.count),)
        else:
            graphs = own.layout.prefill_graphs(own, _seen(mixer, chunk), group.device, times=group.count)
        if group.device == HOST_DEVICE:
            graphs = [replace(graph, ops=_by_host(own, graph.ops, chunk)) for graph in graphs]
        yield from graphs


def _by_host(case: Case, ops: tuple[Op, ...], chunk: Step) -> tuple[Op, ...]:
    """A chunk's attention over a cache on the host: by its processor, or where it comes up by the first device."""
    up = comes_up(case, chunk.q_tokens * chunk.batch)
    made = (from_host(op) if up and op.part == "attention" else (on_processor(case, op),) for op in ops)
    return chained(tuple(op for each in made for op in each), first=0)


def last_device(split: Split) -> int:
    """Where the head and a drafter lie."""
    return (split if isinstance(split, int) else len(split)) - 1


def head_program(case: Case, tokens: int, split: Split) -> Program:
    """Logits of `tokens` tokens, on the last device, and sampling from them where the engine's has a rate.

    A step ends with its logits: what the host takes for it beside kernels is counted here, once.
    """
    model, device = case.model, max(0, placed_layers(case, split)[-1])
    part, active = model.head_part, model.hidden * model.vocab
    weight_format = model.weights.stored(part).format
    read = model.stored_bytes({part: active})
    ops: tuple[Op, ...] = (_linear(case, device, read, active, tokens, weight_format=weight_format),)
    if case.question.gpu_layers == 0:
        ops = (on_processor(case, ops[0]),)
    ops += gathered_logits(case, device, tokens, after=0)
    if "sample/fp32" in case.rules.implementations:  # sampling over all logits has a rate of its own
        kernel, moved = case.rules.kernel("sample", "fp32"), tokens * model.vocab * case.tp * LOGIT_BYTES
        ops += (Op("sampling", device, kernel=kernel, vram_bytes=moved, grain=tokens, after=(len(ops) - 1,)),)
    if case.rules.host_step:
        captured = "eager" if case.question.eager else "decode"
        ops += (Op("host", device, kernel=case.rules.kernel("step", captured), after=(len(ops) - 1,)),)
    return (OpGraph(ops=ops),)


def prefetch_program(case: Case, chunk: Step) -> Program:
    """What runs beside a prefill chunk: the n-gram rows of the next one, since a prompt's tokens are known ahead."""
    ops = _ngram_ops(case, chunk, first=0)
    return (OpGraph(ops=ops),) if ops else ()


def load_program(case: Case) -> Program:
    """What a prompt's cached tokens that lie on the host cost before its prefill: copies of a page in each layer."""
    if case.question.cached_in != "host" or not case.cached_tokens:
        return ()
    mixers = ((case.of(mixer), layers) for mixer, layers in case.model.caches.items())
    copies = (
        Op(
            "kv_load",
            0,
            engine=Engine.H2D,
            link_bytes=offloaded_bytes(own) * layers * case.question.batch,
            run_bytes=case.rules.page_tokens * own.plane_bytes,
        )
        for own, layers in mixers
    )
    return tuple(OpGraph(ops=(copy,)) for copy in copies)


def offloaded_bytes(case: Case) -> float:
    """Bytes of one sequence's cached prefix in a layer: of a window no more than it sees."""
    reach = case.mixer.reach if case.mixer else 0
    return float(min(case.cached_tokens, reach or case.cached_tokens) * case.plane_bytes)


# Ops of a layer, and between layers


def _weights(case: Case, layer: Layer, group: LayerGroup, tokens: int) -> tuple[Op, ...]:
    """All matrices of one layer: each read once per pass, 2 operations per active parameter and token.

    A chain: an op for all parts that are stored alike and multiply in the same operand type; then the elementwise ops
    between the products, where the rate of the products leaves them out. Those of the host are its processor's, or of
    many tokens the first device's.
    """
    device = max(0, group.device)
    model, feed_forward = case.model, layer.feed_forward
    read = layer.parameters(model.hidden, counts.expected_experts(feed_forward, tokens) if feed_forward else None)
    active = layer.parameters(model.hidden, feed_forward.active if feed_forward else None)
    some = feed_forward is not None and feed_forward.experts != feed_forward.active
    alike: dict[tuple[str, str, bool], list[Part]] = {}
    for part in (part for part in _PARTS if active.get(part)):
        operands = model.weights.mlp_operands if part != "attention" else ""
        kept = "" if operands == case.rules.compute_dtype else operands
        alike.setdefault((model.weights.stored(part).format, kept, some and part == "experts"), []).append(part)
    ops: tuple[Op, ...] = ()
    for (weight_format, operands, chosen), parts in alike.items():
        product = _linear(
            case,
            device,
            model.stored_bytes({part: read[part] for part in parts}),
            sum(active[part] for part in parts),
            tokens,
            weight_format=weight_format,
            operation="experts" if chosen else "linear",
            operands=operands,
        )
        on_host = group.device == HOST_DEVICE or (chosen and group.cpu_experts)
        ops += chained(
            products(case, product, group.device, hidden=model.hidden) if on_host else (product,), first=len(ops)
        )
    if f"elementwise/{model.weights.format}" not in case.rules.implementations:
        return ops  # norms, rotation and gating are in the rate of the products (A3)
    kernel = f"elementwise/{case.rules.implementations[f'elementwise/{model.weights.format}']}/bf16"
    moved = counts.elementwise_elements(layer, model.hidden) * HALF_BYTES * tokens
    return (*ops, Op("elementwise", device, kernel=kernel, vram_bytes=moved, grain=tokens, after=(len(ops) - 1,)))


def _linear(
    case: Case,
    device: int,
    read_bytes: float,
    active: float,
    tokens: int,
    *,
    weight_format: str,
    part: str = "weights",
    operation: str = "linear",
    operands: str = "",
    after: tuple[int, ...] = (),
) -> Op:
    """Matrix products of `tokens` tokens with `active` parameters each, stored in `read_bytes` bytes.

    Other numbers of tokens read the same bytes, unless each chooses its experts. Tokens fill up whole tiles of the
    model's own products, a drafter's are taken as they are.
    """
    drafted = part == "draft"
    tile = 1 if drafted else case.rules.row_tiles.get(weight_format, 1)
    return Op(
        part,
        device,
        kernel=case.rules.kernel(operation, weight_format),
        vram_bytes=read_bytes,
        flops=2.0 * active * -(-tokens // tile) * tile,
        dtype=operands or case.rules.operands_of(weight_format),
        grain=tokens,
        row_tile=tile if operation == "linear" and not drafted else 0,
        after=after,
    )


def _recurrence(case: Case, mixer: Recurrent, step: Step, device: int, *, after: int) -> Op:
    """Recurrent state of one layer: read once per sequence, written after each token that may turn out the last."""
    operation = "recurrent" if isinstance(mixer, GatedDeltaNet) else mixer_tag(mixer)
    kernel = case.rules.kernel(operation, "fp32" if case.state_bytes_of(mixer) > HALF_BYTES else "fp16")
    moved = (1 + step.q_tokens) * counts.state_bytes(mixer, case.state_bytes_of(mixer)) * step.batch
    op = Op("state", device, kernel=kernel, vram_bytes=moved, grain=step.batch, after=(after,))
    return on_processor(case, op) if device == HOST_DEVICE else op


def _with_hops(case: Case, tokens: int, split: Split, graphs: list[OpGraph], *, grouped: bool) -> list[OpGraph]:
    """The hops between devices: each where the device changes, or all of them in one graph at the end.

    What the processor's layers leave goes up to the first device.
    """
    up = [_hop(case, tokens, HOST_DEVICE, 0, times=1)] if 0 < case.cpu_layers < case.model.layers else []
    if grouped:
        devices = placed_layers(case, split)
        if not isinstance(split, int):
            crossed = pairwise(dict.fromkeys(device for device in devices if device != HOST_DEVICE))
            return [*graphs, *up, *(_hop(case, tokens, source, target, times=1) for source, target in crossed)]
        crossings = max(0, devices[-1])
        return [*graphs, *up, *([_hop(case, tokens, 0, 1, times=crossings)] if crossings else [])]
    placed: list[OpGraph] = []
    device = 0
    for graph in graphs:
        own = max(0, graph.ops[0].device)
        if own != device:
            placed.append(_hop(case, tokens, device, own, times=1))
            device = own
        placed.append(graph)
    return [*placed, *up]


def _hop(case: Case, tokens: int, source: int, target: int, *, times: int) -> OpGraph:
    """The residual streams of all tokens, from one device, or from the host, through the host to the next."""
    hop_bytes = tokens * case.model.residual_streams * case.model.hidden * case.rules.hop_element_bytes
    down = (Op("hop", source, engine=Engine.D2H, link_bytes=hop_bytes),) if source != HOST_DEVICE else ()
    up = Op("hop", target, engine=Engine.H2D, link_bytes=hop_bytes)
    return OpGraph(ops=chained((*down, up), first=0), times=times)


def _ngram_ops(case: Case, step: Step, *, first: int) -> tuple[Op, ...]:
    """Rows of the n-gram table: fetched from RAM, or from disk a page a row, then sent to device 0.

    Of rows as short as these one in 40 lies in two pages, which is in the share that a kernel reaches. More rows are
    read from RAM by more threads; a disk is asked by as many whatever their number.
    """
    table = case.model.ngram
    if table is None:
        return ()
    tokens = step.q_tokens * step.batch
    rows, on_disk = table.rows_per_token * tokens, case.ngram == "disk"
    run_bytes = max(table.row_bytes, DISK_PAGE_BYTES) if on_disk else table.row_bytes
    fetch = Op(
        "ngram",
        HOST_DEVICE,
        engine=Engine.DISK if on_disk else Engine.HOST,
        kernel=case.rules.kernel("rows_disk" if on_disk else "rows_ram", "uint8"),
        host_bytes=rows * run_bytes,
        run_bytes=run_bytes,
        grain=1 if on_disk else tokens,
        or_plain=True,
    )
    return fetch, Op("ngram", 0, engine=Engine.H2D, link_bytes=rows * table.row_bytes, after=(first,))


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
    """A draft for every sequence in all its passes; before it what any speculating step adds: sampling, launches."""
    drafter, model = speculation.drafter, case.model
    q_tokens = drafter.block_tokens if drafter.kind == "block" else 1
    drafting = Step(kv_tokens=step.kv_tokens, q_tokens=q_tokens, batch=step.batch)
    overheads = [case.rules.kernel("speculate", "step")]
    if case.backend in case.rules.backends.piecewise:
        overheads.append(case.rules.kernel("piecewise", "step"))
    launches = tuple(
        Op("launches", device, kernel=kernel, after=(at - 1,) if at else ()) for at, kernel in enumerate(overheads)
    )
    head, stored = drafter.head_bytes, model.weights.format
    elements = head * 8 / model.part_bits[model.head_part]
    tokens = q_tokens * step.batch
    logits = _linear(case, device, head, elements, tokens, weight_format=stored, part="draft", after=(1,))
    sums = draft_sums(case, drafter, device, tokens, after=2)
    ops = (*_draft_ops(case, drafter, drafting, device, decoding=True), logits, *sums)
    return OpGraph(ops=launches), OpGraph(ops=ops, times=speculation.passes)


def draft_prefill_program(case: Case, speculation: Speculation, chunk: Step, device: int) -> Program:
    """The drafter's layers over a prefill chunk, so that its cache follows the prompt."""
    ops: tuple[Op, ...] = _draft_ops(case, speculation.drafter, chunk, device, decoding=False)
    ops += draft_sums(case, speculation.drafter, device, chunk.q_tokens * chunk.batch, after=1)
    return (OpGraph(ops=ops),)


def _draft_ops(case: Case, drafter: Drafter, step: Step, device: int, *, decoding: bool) -> tuple[Op, Op]:
    """Products and attention of all the drafter's layers, over its window or the whole context."""
    window, tokens = drafter.window, step.q_tokens * step.batch
    kv_tokens = min(step.kv_tokens, window) if window else step.kv_tokens
    held = kv_tokens + step.q_tokens
    seen = held if decoding else kv_tokens + (step.q_tokens + 1) / 2
    kernel = "" if decoding and window else case.attention_kernel("attend_decode" if decoding else "attend_dense")
    attention = Op(
        "draft",
        device,
        kernel=kernel,
        vram_bytes=drafter.layers * held * draft_token_bytes(case, drafter) * step.batch,
        flops=4.0 * drafter.layers * drafter.query_heads * drafter.head_dim * tokens * min(seen, window or seen),
        dtype=case.rules.compute_dtype,
        grain=1 if decoding else step.q_tokens,
        after=(0,),
    )
    size, parameters, stored = drafter.weight_bytes, drafter.parameters, case.model.weights.format
    return _linear(case, device, size, parameters, tokens, weight_format=stored, part="draft"), attention
