"""An engine that lays its whole context out as it starts: cells of caches, states of slots, buffers of a step.

Buffers are what the engine reserves for its largest step: masks, and the widest moment of a layer or of the output, in
fp32. Sources: see `twin/engines/llama_cpp.py`. Held against what it printed: 756 MiB for 1,024 tokens over 262,144
cells of a 27B with states (ggml-org/llama.cpp#25465, 756.0 here); 202 MiB for 512 over 120,064 of a MoE with 8 experts
of 1,536 (201.3).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from hwprofiles.profile import HardwareProfile
from twin.ask.case import Case
from twin.engines.rules import CellRules
from twin.errors import Impossible
from twin.formats import kv_format
from twin.memory.memory import Memory, head_bytes
from twin.models.mixers import Attending, LatentAttention, Recurrent, conv_elements
from twin.models.spec import FeedForward, Layer, Part
from twin.operations.counts import FULL_BYTES, HALF_BYTES
from twin.operations.lower import placed_layers
from twin.operations.ops import HOST_DEVICE


class _Cells(NamedTuple):
    """How many cells there are, and for whom."""

    streams: int  # caches side by side, each with cells of its own
    slots: int  # sequences, each with a state
    full: int  # cells of a stream
    tokens: int  # of a step


def cell_rules(case: Case) -> CellRules:
    """The engine's rules for its cells; Impossible where it has none."""
    if case.rules.cells is None:
        raise Impossible(f"{case.rules.name} does not lay its context out at the start")
    return case.rules.cells


def _cells(case: Case) -> _Cells:
    """Sequences have streams of their own, unless there are more slots than are asked about, which share the cells."""
    question = case.question
    slots = question.max_sequences or (question.batch if question.batch > 1 else cell_rules(case).slots)
    streams = question.batch if slots == question.batch else 1
    full = _padded(case, question.ctx_tokens) * (question.batch // streams)
    return _Cells(streams=streams, slots=slots, full=full, tokens=min(case.chunk_tokens, full * streams))


def _padded(case: Case, tokens: int) -> int:
    return case.rules.pages(tokens) * case.rules.page_tokens


def _seen_cells(case: Case, cells: _Cells, mixer: Attending) -> int:
    """Cells of one stream in a layer with that attention: of windows no more than they and a chunk need."""
    if not mixer.reach or case.question.whole_windows:
        return cells.full
    window = mixer.reach * (cells.slots if cells.streams == 1 else 1) + cells.tokens
    return _padded(case, min(cells.full, window))


def _growing(case: Case, kinds: Iterable[Layer]) -> tuple[list[Attending], list[Attending]]:
    """Caches of these layers: those that grow with the context, and those that end with their windows."""
    caches = [mixer for layer in kinds for mixer in layer.attending if mixer.keeps_cache]
    whole = case.question.whole_windows
    return [each for each in caches if whole or not each.reach], [each for each in caches if each.reach and not whole]


def _page_bytes(case: Case, kinds: Iterable[Layer]) -> float:
    """Bytes of a page of every sequence in caches that grow with the context."""
    token_bytes = sum(_token_bytes(case, mixer) for mixer in _growing(case, kinds)[0])
    return float(token_bytes * case.rules.page_tokens * case.question.batch)


def _window_bytes(case: Case, kinds: Iterable[Layer], cells: _Cells) -> float:
    """Bytes of the caches of windows."""
    windows = _growing(case, kinds)[1]
    return float(sum(_token_bytes(case, each) * _seen_cells(case, cells, each) * cells.streams for each in windows))


def _token_bytes(case: Case, mixer: Attending) -> int:
    own = case.of(mixer)
    return own.plane_bytes + own.index_key_bytes


def _state_bytes(case: Case, kinds: Iterable[Layer], cells: _Cells) -> float:
    """Bytes of states and of what their convolutions look back on, one more of each for every drafted token."""
    elements = sum(each.state_elements + conv_elements(each) for layer in kinds for each in layer.recurrent)
    copies = 1 + (case.speculation.tokens if case.speculation else 0)
    return float(elements * case.state_element_bytes * cells.slots * copies)


# Buffers of a step


def _mask_bytes(case: Case, cells: _Cells) -> float:
    """Bytes of the masks of one step, one for each kind of cache: a number for each of its tokens and each cell."""
    fused = case.backend in cell_rules(case).fuses
    seen = {bool(mixer.reach): _seen_cells(case, cells, mixer) for mixer in case.model.caches}
    return float(sum(seen.values()) * cells.tokens * (HALF_BYTES if fused else FULL_BYTES))


def _layer_bytes(case: Case, layer: Layer, cells: _Cells) -> float:
    """Bytes of the widest moment of a layer, the residual stream and what is added to it included."""
    widest = max((_fed(layer.feed_forward, case.model.hidden), *(_mixed(case, mixer) for mixer in layer.mixers)))
    beside = max((_scores(case, mixer, cells) for mixer in layer.attending), default=0.0)
    streams = 2 * case.model.hidden
    of_attention = max((_mixed(case, mixer) for mixer in layer.attending), default=0) + streams
    return max((widest + streams) * cells.tokens * FULL_BYTES, of_attention * cells.tokens * FULL_BYTES + beside)


def _fed(feed_forward: FeedForward | None, hidden: int) -> int:
    """Elements of a token inside a feed-forward: gate, up and their product, or that and each expert's output."""
    if feed_forward is None:
        return 0
    inner = feed_forward.intermediate * feed_forward.active
    outputs = inner + feed_forward.active * hidden if feed_forward.experts > 1 else 0
    return max(3 * inner, outputs, 3 * feed_forward.shared_intermediate)


def _mixed(case: Case, mixer: object) -> int:
    """Elements of a token inside a mixer: queries twice (and gates), keys, values, outputs; convolutions in and out."""
    if isinstance(mixer, Recurrent):
        return 4 * mixer.conv_channels
    if isinstance(mixer, LatentAttention):
        return mixer.query_heads * (2 * mixer.kv_elements + mixer.kv_rank)
    own = case.of(mixer).attention if isinstance(mixer, Attending) else None
    if own is None:
        return 0
    outputs = own.query_heads * own.value_width * (2 if own.output_gate else 1)
    return 2 * own.query_heads * own.head_dim + own.kv_elements + outputs


def _scores(case: Case, mixer: Attending, cells: _Cells) -> float:
    """Bytes beside activations: scores of all heads in fp32, or a copy of the layer's cache in 16 bits."""
    rules, seen = cell_rules(case), _seen_cells(case, cells, mixer) * cells.streams
    if case.backend not in rules.fuses:
        return float(mixer.query_heads * seen * cells.tokens // cells.streams * FULL_BYTES)
    return 0.0 if case.fmt.name == rules.plain else float(mixer.kv_elements * seen * HALF_BYTES)


def _compute_bytes(case: Case, kinds: list[Layer], cells: _Cells, *, copies: int, last: bool) -> float:
    """Bytes of the buffer of one device: masks beside its widest layer, or the logits of every slot's next tokens."""
    layers = max((_layer_bytes(case, layer, cells) for layer in kinds), default=0.0)
    masks = _mask_bytes(case, cells) * copies if any(layer.attending for layer in kinds) else 0.0
    drafted = case.speculation.tokens if case.speculation else 0
    outputs = min(cells.tokens, cells.slots * (1 + drafted))
    logits = (outputs * case.model.vocab + cells.tokens * case.model.hidden) * FULL_BYTES if last else 0.0
    return max(masks + layers, logits)


def _draft_parts(case: Case, cells: _Cells) -> dict[str, float]:
    """A drafter's own context: its weights, the cache of its layers in their own format, and a buffer like the model's.

    What it drafts with in the engine is a layer of the model's kinds: the buffer is taken as that of the widest.
    """
    if case.speculation is None:
        return {}
    drafter = case.speculation.drafter
    token = kv_format(cell_rules(case).draft_format).plane_bytes(kv_heads=drafter.kv_heads, head_dim=drafter.head_dim)
    seen = min(cells.full, _padded(case, drafter.window + cells.tokens)) if drafter.window else cells.full
    masks = seen * cells.tokens * HALF_BYTES
    widest = max(_fed(layer.feed_forward, case.model.hidden) for layer in case.model.kinds.values())
    compute = masks + (widest + 2 * case.model.hidden) * cells.tokens * FULL_BYTES
    cache = float(drafter.layers * token * seen * cells.streams)
    size = case.model.stored_bytes({"feed_forward": drafter.parameters})  # its head is the model's own
    return {"drafter": size, "draft cache": cache, "draft buffers": float(compute)}


# Memories


def cell_memories(case: Case, profile: HardwareProfile) -> list[Memory]:
    """Every device with its layers, then the host with what is left to the processor."""
    cells, rules, kinds = _cells(case), cell_rules(case), [case.model.kinds[kind] for kind in case.model.layer_kinds]
    places = placed_layers(case, profile.stages(case.tp))
    used = sorted(set(places) - {HOST_DEVICE}) or [0]
    apart = len(used) > 1 and not (case.cpu_layers or case.question.cpu_experts or case.layout.host_planes)
    memories = []
    for device in used:
        own = [kind for kind, place in zip(kinds, places, strict=True) if place == device]
        last = device == used[-1]
        experts = sum(_expert_bytes(case, kinds[at]) for at in _cpu_experts(case) if places[at] == device)
        head = head_bytes(case) if last and _offloads(case) else 0.0
        copies = rules.input_copies if apart else 1
        parts = {
            "weights": _weight_bytes(case, own) - experts + head,
            "buffers": _compute_bytes(case, own, cells, copies=copies, last=last) + _on_their_way(case, kinds),
        }
        if not case.layout.host_planes:
            parts |= {"recurrent state": _state_bytes(case, own, cells), "windows": _window_bytes(case, own, cells)}
        parts |= _draft_parts(case, cells) if last else {}
        page = 0.0 if case.layout.host_planes else _page_bytes(case, own)
        memories.append(
            Memory(
                name=f"gpu{device}",
                capacity_bytes=profile.gpu_of(device).vram.value,
                fixed={name: size for name, size in parts.items() if size} | {"workspace": case.rules.workspace.value},
                page_bytes={"kv cache": page},
                capacity_spread=math.hypot(case.rules.workspace.deviation, profile.gpu_of(device).vram.deviation),
            )
        )
    return [*memories, _host(case, profile, cells, kinds)]


def _host(case: Case, profile: HardwareProfile, cells: _Cells, kinds: list[Layer]) -> Memory:
    """Embedding, layers and experts of the processor with their caches, and inputs of a step before they are copied."""
    own = kinds[: case.cpu_layers]
    kept = kinds if case.layout.host_planes else own
    experts = sum(_expert_bytes(case, kinds[at]) for at in _cpu_experts(case))
    tokens = 2 * cells.tokens * case.model.hidden * FULL_BYTES
    fixed = {
        "reserved": profile.host.reserved.value,
        "embedding": case.model.weight_bytes["embedding"],
        "weights": _weight_bytes(case, own) + experts + (0.0 if _offloads(case) else head_bytes(case)),
        "recurrent state": _state_bytes(case, kept, cells),
        "windows": _window_bytes(case, kept, cells),
        "buffers": _mask_bytes(case, cells) + tokens,
    }
    return Memory(
        name="host",
        capacity_bytes=profile.host.memory.value,
        fixed={name: size for name, size in fixed.items() if size},
        page_bytes={"kv cache": _page_bytes(case, kept)},
        capacity_spread=math.hypot(profile.host.reserved.deviation, profile.host.memory.deviation),
    )


def _offloads(case: Case) -> bool:
    """Whether the output is on a device: it is the first that is."""
    return case.question.gpu_layers != 0


def _weight_bytes(case: Case, kinds: Iterable[Layer]) -> float:
    return sum(case.model.stored_bytes(layer.parameters(case.model.hidden)) for layer in kinds)


def _cpu_experts(case: Case) -> range:
    """Layers on devices whose experts are the processor's."""
    return range(case.cpu_layers, max(case.cpu_layers, min(case.model.layers, case.question.cpu_experts)))


def _expert_bytes(case: Case, layer: Layer) -> float:
    return _part_bytes(case, layer, "experts")


def _part_bytes(case: Case, layer: Layer, part: Part) -> float:
    counts = layer.parameters(case.model.hidden)
    return case.model.stored_bytes({part: counts[part]}) if counts.get(part) else 0.0


def _on_their_way(case: Case, kinds: list[Layer]) -> float:
    """Bytes of weights of the host while a device multiplies many tokens with them: two of three matrices of a layer.

    Of a mixture whose experts have three matrices of 648 MiB, a device that they went to printed 1,100 MiB more than
    others: from 648 to 1,296.
    """
    experts = [_expert_bytes(case, kinds[at]) for at in _cpu_experts(case)]
    fed = [
        max(_expert_bytes(case, layer), _part_bytes(case, layer, "feed_forward")) for layer in kinds[: case.cpu_layers]
    ]
    return max((*experts, *fed), default=0.0) * 2 / 3
