"""What an engine with tensors for a cache holds beside weights: windows, tokens that wait unquantised, transients."""

from collections.abc import Sequence

from twin.ask.case import Case
from twin.errors import Impossible
from twin.models.spec import Layer
from twin.operations.counts import HALF_BYTES


def tensor_parts(case: Case, layers: Sequence[tuple[Layer, int]]) -> dict[str, float]:
    """Bytes by part on a device with so many of these layers."""
    rules, question = case.rules.tensor_cache, case.question
    if rules is None:
        raise Impossible(f"{case.rules.name} keeps no tensors for a cache")
    windows, waiting = 0, 0
    for layer, count in layers:
        for mixer in (mixer for mixer in layer.attending if mixer.keeps_cache):
            half = mixer.kv_elements * HALF_BYTES
            if mixer.reach:
                windows += min(question.ctx_tokens, mixer.reach) * half * count
            elif case.fmt.kind != "plain":
                waiting += min(question.ctx_tokens, rules.residual_tokens) * half * count
    live = max(live_elements(case, layer) for layer, _ in layers) if layers else 0
    tokens = min(question.ctx_tokens, case.chunk_tokens)
    return {
        "windows": float(windows * question.batch),
        "unquantised tokens": float(waiting * question.batch),
        "activations": float(live * tokens * HALF_BYTES * question.batch),
    }


def live_elements(case: Case, layer: Layer) -> int:
    """Elements that one token holds at the widest place of a layer."""
    rules, feed_forward = case.rules.tensor_cache, layer.feed_forward
    if rules is None:
        return 0
    width = 0
    if feed_forward is not None:
        width = feed_forward.intermediate * feed_forward.active + feed_forward.shared_intermediate
    return rules.live_hidden * case.model.hidden + rules.live_intermediate * width
