"""What an engine's start-up profile sees before it sizes its pool: the peak of one full step, of sampling, of a tower.

The profile runs a tower over its largest input, a step of as many tokens as there may be, and the sampler over as many
sequences. These come one after the other, so the peak is that of the largest, beside what lies there meanwhile.
Sources: vLLM 0.28.0, `v1/worker/gpu_model_runner.py` (`profile_run`, `_dummy_sampler_run`, `profile_cudagraph_memory`),
`v1/sample/`, `model_executor/layers/fused_moe/` (`workspace_shapes`), `config/vllm.py` (sizes that are captured).
"""

import math
from typing import NamedTuple

from msgspec.structs import replace

from hwprofiles.profile import Gpu
from hwprofiles.rates import Rate
from twin.ask.case import Case
from twin.engines.rules import BlockPoolRules, version_numbers
from twin.errors import Impossible
from twin.models.spec import FeedForward, ModelSpec
from twin.operations.counts import FULL_BYTES, HALF_BYTES

SMALL_GRAPHS = (1, 2, 4)
GRAPH_STEP, LARGE_GRAPH_STEP, LARGE_GRAPHS = 8, 16, 256
"""Captured steps are of 1, 2 and 4 tokens, then every 8 up to 256, then every 16 (`_set_cudagraph_sizes`)."""

ENCODER = ("vision", "audio")  # towers that are run over an input before the language model


class _Phase(NamedTuple):
    """Bytes of a phase of the profile, and their standard deviation."""

    size: float
    deviation: float


def pool_rules(case: Case) -> BlockPoolRules:
    """The engine's rules for its pool; Impossible where it has none."""
    if case.rules.block_pool is None:
        raise Impossible(f"{case.rules.name} shares no pool of blocks among requests")
    return case.rules.block_pool


def startup_parts(case: Case, gpu: Gpu) -> dict[str, Rate]:
    """Bytes by part that the engine takes off a device's share beside weights."""
    rules = pool_rules(case)
    startup = rules.startup
    parts = {"activations": activations(case, gpu), "graphs": _graphs(case, rules)}
    parts["context"] = startup.context if case.tp == 1 else startup.rank_context
    if case.backend in rules.backend_workspace:
        parts["backend workspace"] = rules.backend_workspace[case.backend]
    return {name: rate for name, rate in parts.items() if rate.value}


def activations(case: Case, gpu: Gpu) -> Rate:
    """Bytes of the peak that the profile prints, without graphs."""
    startup, model = pool_rules(case).startup, case.model
    tokens, sequences = batched_tokens(case), min(most_sequences(case), batched_tokens(case))
    has_tower = any(model.towers.get(name) for name in ENCODER)
    rest = startup.tower_rest if has_tower else _nothing(startup.tower_rest)
    phases = [_forward(case, tokens)]
    if case.ends.last:
        phases.append(_sampling(case, tokens, sequences))
    if has_tower:
        phases.append(_Phase(startup.towers.value - rest.value, startup.towers.deviation))
    peak = max(phases)
    library = next(
        size
        for least, size in startup.libraries.items()
        if version_numbers(gpu.compute_capability) >= version_numbers(least)
    )
    value = peak.size + rest.value + library
    spread = math.hypot(peak.deviation, rest.deviation) / value
    return replace(startup.forward, value=value, unit="B", spread=spread, note="the largest phase of the profile")


def batched_tokens(case: Case) -> int:
    """Most tokens of one step."""
    return case.question.chunk_tokens or pool_rules(case).batched_tokens


def most_sequences(case: Case) -> int:
    """Most sequences that run at once."""
    return case.question.max_sequences or max(pool_rules(case).max_sequences, case.question.batch)


def captured_tokens(largest: int) -> list[int]:
    """Tokens of the steps that are captured, up to `largest`."""
    sizes = [*SMALL_GRAPHS, *range(GRAPH_STEP, LARGE_GRAPHS, GRAPH_STEP)]
    return [size for size in (*sizes, *range(LARGE_GRAPHS, largest + 1, LARGE_GRAPH_STEP)) if size <= largest]


def layer_elements(model: ModelSpec) -> int:
    """Elements a token in 16 bits at the widest point of a layer: its residual streams and the feed-forward's buffers.

    Gate and up beside their product; of experts the inputs and outputs of each that is chosen, and their sum.
    """
    feeds = (layer.feed_forward for layer in model.kinds.values() if layer.feed_forward is not None)
    return model.residual_streams * model.hidden + max((_feed_elements(model, each) for each in feeds), default=0)


def _feed_elements(model: ModelSpec, feed_forward: FeedForward) -> int:
    inner = feed_forward.intermediate
    outer = inner * 2 if feed_forward.gated else inner
    if feed_forward.experts == 1:
        return outer + inner
    width = feed_forward.expert_hidden or model.hidden
    return feed_forward.active * (max(outer, width) + max(inner, width)) + width


def _forward(case: Case, tokens: int) -> _Phase:
    """A pass of the widest layer; operands in fewer bits are made from copies; compiled the first time."""
    startup, model, eager = pool_rules(case).startup, case.model, case.question.eager
    counted: float = tokens * HALF_BYTES * layer_elements(model)
    if model.weights.mlp_operands:
        widest = max(layer.feed_forward.intermediate for layer in model.kinds.values() if layer.feed_forward)
        counted += tokens * widest * startup.operand_bytes.value
    size, deviation = counted * startup.forward.value, counted * startup.forward.deviation
    if case.question.cold_start and not eager:
        return _Phase(size + startup.compiler.value, math.hypot(deviation, startup.compiler.deviation))
    return _Phase(size, deviation)


def _sampling(case: Case, tokens: int, sequences: int) -> _Phase:
    """Logits of every sequence's last token, several times over, beside the states that they are of.

    Every rank gathers those of the whole vocabulary (`model_executor/layers/logits_processor.py`).
    """
    startup, model = pool_rules(case).startup, case.model
    plain = startup.plain_sampled_copies if runs_plain(model) else None
    copies = plain or startup.sampled_copies
    logits = sequences * model.vocab * case.tp * FULL_BYTES
    states = (tokens + 2 * sequences) * model.hidden * HALF_BYTES
    return _Phase(copies.value * logits + states, copies.deviation * logits)


def runs_plain(model: ModelSpec) -> bool:
    """Whether it has neither recurrent states nor experts."""
    return not model.states and "experts" not in model.parameters


def _graphs(case: Case, rules: BlockPoolRules) -> Rate:
    """What is kept for CUDA graphs. A block drafter's runner captures more of them, the longer its drafts."""
    startup, speculation, question = rules.startup, case.speculation, case.question
    if question.eager:
        return _nothing(startup.graph_layer)
    if speculation is not None and speculation.drafter.kind == "block":
        long = speculation.tokens >= speculation.drafter.block_tokens
        return rules.long_draft_graphs if long else rules.draft_graphs
    if not startup.reserves_graphs or (startup.plain_sampled_copies is not None and runs_plain(case.model)):
        return _nothing(startup.graph_layer)
    decoded = most_sequences(case) * (1 + (speculation.tokens if speculation else 0))
    largest = question.graph_tokens or min(2 * decoded, startup.graph_tokens)
    sizes = captured_tokens(min(largest, batched_tokens(case)))
    in_pieces = speculation is not None and case.verify_backend in case.rules.backends.piecewise
    whole = 0 if in_pieces else sum(size <= decoded for size in sizes)
    layers = case.model.layers + 1
    value = layers * (len(sizes) * startup.graph_layer.value + whole * startup.whole_graph_layer.value)
    return replace(startup.graph_layer, value=value)


def _nothing(rate: Rate) -> Rate:
    return replace(rate, value=0.0)
