"""Ops of latent attention: decode reads the compressed cache as it is, prefill expands it to keys and values of heads.

Sources: vLLM 0.28.0 `v1/attention/backends/mla/common.py` (which of the two ways a pass takes) and DeepSeek-V2's paper.
"""

from twin.ask.case import Case
from twin.models.mixers import LatentAttention
from twin.operations.ops import Op, Step


def decode_attention(case: Case, mixer: LatentAttention, step: Step, device: int, *, after: tuple[int, ...]) -> Op:
    """Every head's query meets the compressed vector and the roped key of every token, then sums compressed vectors.

    What takes queries into the compressed space and sums out of it are products of the layer's weights.
    """
    seen = step.end if mixer.indexer is None else min(step.end, mixer.indexer.budget)
    return Op(
        "attention",
        device,
        kernel=case.attention_kernel("attend_latent_decode"),
        vram_bytes=seen * case.plane_bytes * step.batch,
        flops=2.0 * mixer.query_heads * (mixer.kv_elements + mixer.kv_rank) * seen * step.q_tokens * step.batch,
        dtype=case.operand_dtype,
        grain=step.q_tokens,
        after=after,
    )


def prefill_ops(case: Case, mixer: LatentAttention, chunk: Step, device: int) -> tuple[Op, ...]:
    """Write the new tokens, expand the cached ones, attend with whole heads: a chain."""
    tokens, width = chunk.q_tokens * chunk.batch, mixer.nope_dim + mixer.value_dim
    heads = mixer.query_heads * (mixer.nope_dim + mixer.rope_dim + mixer.value_dim)
    append = Op(
        "append",
        device,
        kernel=case.attention_kernel("append"),
        vram_bytes=tokens * (mixer.kv_elements * 2 + case.plane_bytes),
        grain=tokens,
    )
    expanded = 2.0 * chunk.kv_tokens * chunk.batch * mixer.kv_rank * mixer.query_heads * width
    attend = Op(
        "attention",
        device,
        kernel=case.attention_kernel("attend_latent_dense"),
        vram_bytes=chunk.end * case.plane_bytes * chunk.batch,
        flops=expanded + 2.0 * heads * chunk.pairs * chunk.batch,
        dtype=case.operand_dtype,
        grain=chunk.q_tokens,
        after=(0,),
    )
    return append, attend
