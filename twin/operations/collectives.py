"""What ranks that share layers tell each other: sums behind attention and feed-forward, the whole row of logits.

A ring of n ranks sums in 2 (n - 1) steps of an n-th of the message each, and gathers in half as many. Sources: vLLM
0.28 `model_executor/layers/linear.py` (`RowParallelLinear` sums), `vocab_parallel_embedding.py` (so do embeddings),
`logits_processor.py` (logits are gathered); NCCL 2.28.7 `src/graph/tuning.cc` (steps, and what one adds).
"""

from twin.ask.case import Case
from twin.models.spec import Drafter, Layer
from twin.operations.counts import HALF_BYTES
from twin.operations.ops import PEER, Engine, Op, OpGraph, Program


def layer_sums(case: Case, layer: Layer, device: int, tokens: int, *, after: int) -> tuple[Op, ...]:
    """Sums of `tokens` tokens of one layer, one for what mixes tokens and one for the feed-forward."""
    calls = bool(layer.mixers) + (layer.feed_forward is not None)
    if case.tp == 1 or not calls:
        return ()
    return (_sum(case, device, tokens, calls=calls, after=(after,) if after >= 0 else ()),)


def draft_sums(case: Case, drafter: Drafter, device: int, tokens: int, *, after: int) -> tuple[Op, ...]:
    """Sums of one pass of a drafter, whose layers are shared like the model's."""
    if case.tp == 1:
        return ()
    return (_sum(case, device, tokens, calls=2 * drafter.layers, after=(after,)),)


def embedding_program(case: Case, tokens: int) -> Program:
    """The sum of embeddings of a divided vocabulary, where devices look them up."""
    if case.tp == 1 or case.rules.embedding_on_host:
        return ()
    return (OpGraph(ops=(_sum(case, 0, tokens, calls=1, after=()),)),)


def gathered_logits(case: Case, device: int, tokens: int, *, after: int) -> tuple[Op, ...]:
    """The whole vocabulary's logits of `tokens` tokens on every rank, in 16 bits."""
    if case.tp == 1:
        return ()
    message_bytes = tokens * case.model.vocab * case.tp * HALF_BYTES
    return (_over_ring(case, device, "all_gather", message_bytes, rounds=1, after=(after,)),)


def _sum(case: Case, device: int, tokens: int, *, calls: int, after: tuple[int, ...]) -> Op:
    message_bytes = tokens * case.model.hidden * HALF_BYTES
    return _over_ring(case, device, "all_reduce", message_bytes, rounds=2, calls=calls, after=after)


def _over_ring(
    case: Case,
    device: int,
    operation: str,
    message_bytes: float,
    *,
    rounds: int,
    after: tuple[int, ...],
    calls: int = 1,
) -> Op:
    """`rounds` times around the ring, every rank's share of the message."""
    ranks = case.tp
    return Op(
        operation,
        device,
        engine=Engine.PEER,
        kernel=case.rules.kernel(operation, PEER),
        calls=calls,
        link_bytes=rounds * (ranks - 1) / ranks * message_bytes,
        hops=rounds * (ranks - 2),
        grain=message_bytes,
        or_plain=True,
        after=after,
    )
