"""Ops of latent attention: decode reads the compressed cache as it is, prefill expands it to keys and values of heads.

An indexer before it scores one key a token and keeps the best `budget` of them. Sources: vLLM 0.28.0
`v1/attention/backends/mla/` (which of the two ways a pass takes); DeepSeek-V3.2's `inference/model.py` (the indexer).
"""

from twin.ask.case import Case
from twin.models.mixers import LatentAttention
from twin.operations.counts import FULL_BYTES, HALF_BYTES
from twin.operations.ops import Op, Step


def decode_ops(case: Case, mixer: LatentAttention, step: Step, device: int, *, first: int) -> tuple[Op, ...]:
    """Every head's query meets the compressed vector and the roped key of a token, then sums compressed vectors.

    What takes queries into the compressed space and sums out of it are products of the layer's weights. A chain after
    op `first` - 1.
    """
    index = _index_ops(case, mixer, step, device, after=(first - 1,) if first else ())
    seen = min(step.end, mixer.indexer.budget) if mixer.indexer else step.end
    attend = Op(
        "attention",
        device,
        kernel=case.attention_kernel("attend_latent_decode"),
        vram_bytes=seen * case.plane_bytes * step.batch,
        flops=2.0 * mixer.query_heads * (mixer.kv_elements + mixer.kv_rank) * seen * step.q_tokens * step.batch,
        dtype=case.operand_dtype,
        grain=step.q_tokens,
        after=(first + len(index) - 1,),
    )
    return (*index, attend)


def prefill_ops(case: Case, mixer: LatentAttention, chunk: Step, device: int) -> tuple[Op, ...]:
    """Write the new tokens, expand the cached ones, attend with whole heads: a chain.

    With an indexer every token attends to what it selected, in the compressed space.
    """
    tokens = chunk.q_tokens * chunk.batch
    append = Op(
        "append",
        device,
        kernel=case.attention_kernel("append"),
        vram_bytes=tokens * (mixer.kv_elements * HALF_BYTES + case.plane_bytes),
        grain=tokens,
    )
    index = _index_ops(case, mixer, chunk, device, after=(0,))
    expanded = chunk.kv_tokens * chunk.batch * mixer.kv_rank * mixer.query_heads * (mixer.nope_dim + mixer.value_dim)
    pairs, width, operation = chunk.pairs, mixer.nope_dim + mixer.rope_dim + mixer.value_dim, "attend_latent_dense"
    if mixer.indexer is not None and chunk.end > mixer.indexer.budget:
        pairs, width = chunk.within_window(mixer.indexer.budget).pairs, mixer.kv_elements + mixer.kv_rank
        expanded, operation = 0, "attend_latent_sparse"
    attend = Op(
        "attention",
        device,
        kernel=case.attention_kernel(operation),
        vram_bytes=chunk.end * case.plane_bytes * chunk.batch,
        flops=2.0 * (expanded + mixer.query_heads * width * pairs * chunk.batch),
        dtype=case.operand_dtype,
        grain=chunk.q_tokens,
        after=(len(index),),
    )
    return (append, *index, attend)


def _index_ops(
    case: Case, mixer: LatentAttention, step: Step, device: int, *, after: tuple[int, ...]
) -> tuple[Op, ...]:
    """Scores of all cached tokens and the best of them, once there are more than the budget."""
    indexer = mixer.indexer
    if indexer is None or indexer.shared or step.end <= indexer.budget:
        return ()
    score = Op(
        "score",
        device,
        kernel=case.index_kernel("index_tokens"),
        vram_bytes=step.end * case.index_key_bytes * step.batch + FULL_BYTES * step.pairs * step.batch,
        flops=2.0 * indexer.query_heads * indexer.head_dim * step.pairs * step.batch,
        dtype=case.operand_dtype,
        grain=step.end,
        after=after,
    )
    return (score,)
