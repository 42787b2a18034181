"""Ops over a cache that is two tensors a layer: joined anew in every pass, and dequantised whole where quantised.

Windows stay in 16 bits and in VRAM. Source: transformers 5.24, `cache_utils.py` (`DynamicLayer`, `StaticLayer`,
`QuantizedLayer`, `Cache.update`).
"""

from msgspec.structs import replace

from twin.ask.case import Case
from twin.formats import kv_format
from twin.models.mixers import Attention
from twin.operations import attention
from twin.operations.ops import Op, OpGraph, Step


def is_quantised(case: Case) -> bool:
    """Whether the layers that the case is about keep their planes quantised."""
    return case.fmt.kind != "plain" and not (isinstance(case.mixer, Attention) and case.mixer.reach)


def computed(case: Case) -> Case:
    """The case as its attention computes: in 16 bits, whatever is stored."""
    return replace(case, fmt=kv_format(case.rules.compute_dtype)) if case.fmt.kind != "plain" else case


def token_bytes(case: Case) -> int:
    """K and V of one token in one layer, as attention reads them."""
    return computed(case).plane_bytes


def working_bytes(case: Case) -> dict[str, int]:
    """What a pass makes of one layer beside what is kept: a joined K; quantised, K and V in 16 bits, twice."""
    kept = token_bytes(case) * case.question.ctx_tokens * case.question.batch
    return {"joined planes": 2 * kept if is_quantised(case) else kept // 2}


def joining_ops(case: Case, step: Step, device: int, *, after: tuple[int, ...], grows: bool = True) -> tuple[Op, ...]:
    """What a pass does to the planes before attention reads them; a chain that begins after `after`.

    Old planes and new tokens are copied into new ones. Quantised ones are dequantised first, and quantised again once
    `residual_tokens` have come.
    """
    half, batch = token_bytes(case), step.batch
    if not is_quantised(case):
        moved = 2 * step.end * half if grows else step.q_tokens * half * 2
        return (Op("append", device, vram_bytes=moved * batch, after=after),)
    rules = case.rules.tensor_cache
    passes = step.q_tokens / rules.residual_tokens if rules else 0.0
    again = step.end * (half + case.plane_bytes) * min(1.0, passes)
    join = Op("append", device, vram_bytes=(2 * step.end * half + again) * batch, after=after)
    if not step.kv_tokens:
        return (join,)
    dequantise = Op(
        "dequantise",
        device,
        kernel=case.attention_kernel("dequantise"),
        vram_bytes=step.kv_tokens * (case.plane_bytes + half) * batch,
        grain=step.kv_tokens,
        after=after,
    )
    return dequantise, replace(join, after=(after[0] + 1,) if after else (0,))


def decode_ops(case: Case, step: Step, device: int, *, first: int, grows: bool = True) -> tuple[Op, ...]:
    """A decode step of one layer: planes made anew, then read whole."""
    joined = joining_ops(case, step, device, after=(first - 1,), grows=grows)
    read = attention.decode_attention(computed(case), step, device, after=(first + len(joined) - 1,))
    return (*joined, read)


def prefill_graph(case: Case, chunk: Step, device: int, *, times: int, grows: bool = True) -> OpGraph:
    """A chunk of one layer: planes made anew, then attention over all of them."""
    joined = joining_ops(case, chunk, device, after=(), grows=grows)
    plain = attention.dense_graph(replace(computed(case), backend=""), chunk, device, times=times, link_bytes=0)
    kernel = computed(case).attention_kernel("attend_dense")
    attend = replace(plain.ops[-1], kernel=kernel, after=(len(joined) - 1,))
    return OpGraph(ops=(*joined, attend), times=times)
