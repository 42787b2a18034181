"""Fused decode attention over int4 caches with a scale and a zero point per token and head.

Scores: k = (code - zero) scale, so that s = scale (q . code - zero sum(q)), with the query in fp16 below 2^10 by one
power of two a KV head. Values: codes less 7.5, since a large sum would drown a small output, and sum(p v_scale (zero
- 7.5)) is taken off at the end. No element is multiplied: a code costs a mask, half a shift, of V a subtraction.
"""

import torch

from realkernels.attend.launch_words import Codes, launch_words, plan_columns, plan_small, plan_wide, wide_is_less
from realkernels.attend.plan import TilePlan, checked_call, is_large, tile_tokens
from realkernels.attend.splits import Workspace
from realkernels.attend.word_tiles import INT4


def plan_words(*, query_rows: int, head_dim: int, device: torch.device) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256), and one that fits where shared memory is 100 KiB.

    `query_rows` is query tokens x query heads of a KV head; more than 24 are cut into blocks, of 24 or of 32.
    """
    if not is_large(device):
        return plan_small(query_rows=query_rows, head_dim=head_dim)
    if wide_is_less(query_rows, sets=3):
        return plan_wide(head_dim=head_dim)
    return plan_columns(
        query_rows=query_rows, tile=tile_tokens(head_dim, of_256=128), num_warps=4, per_multiprocessor=2
    )


def attend_int4(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_scale: torch.Tensor, value_scale: torch.Tensor,
    page_table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, workspace: Workspace, *,
    softmax_scale: float, plan: TilePlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of the newest q_tokens tokens of each sequence over 4-bit codes, into `out`, in the stored basis.

    query and out [batch, q_tokens, query_heads, head_dim]; keys and values uint8 [pages, kv_heads, page_tokens,
    head_dim / 2] with any even strides (4 bytes and more let loads be asynchronous), element 2j in the low nibble of
    byte j; key_scale and value_scale fp32 [pages, kv_heads, page_tokens] with equal strides, positive, zero points in
    their low four bits. page_table int32 [batch, max_pages], lengths int32 [batch], new tokens included. Query i of q
    sees the first lengths - q + i + 1 tokens; one that sees none gets zeros. `workspace` comes from the plan
    (`plan_words` where none is given). Two launches, no host synchronisation; page numbers and lengths are trusted.
    """
    words_k, words_v = keys.view(torch.int16), values.view(torch.int16)
    call = checked_call(query, words_k, words_v, page_table, lengths, out, workspace, width=query.shape[3] // 4)
    for scale in (key_scale, value_scale):
        if scale.stride() != key_scale.stride() or scale.shape != keys.shape[:3]:
            raise ValueError(f"scales {tuple(scale.shape)} {scale.stride()} are not {tuple(keys.shape[:3])}")
    if plan is None:
        plan = plan_words(query_rows=call.query_rows, head_dim=call.head_dim, device=query.device)
    words = (words_k.unflatten(3, (-1, 8)), words_v.unflatten(3, (-1, 8)))
    return launch_words(
        call, query, words, (key_scale, value_scale, value_scale), page_table, lengths, out, workspace, plan,
        form=INT4, softmax_scale=softmax_scale, key_codes=Codes(), value_codes=Codes(),
    )  # fmt: skip
