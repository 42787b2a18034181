"""Fused decode attention over caches with an fp16 scale per 32 elements: q4_0, q8_0 and exl3 in 4 or 8 bits.

A code is brought to fp16 exactly, its zero taken off, and multiplied by its group's scale, two at a time: x = (code -
zero) scale, rounded once. Scales are read once a group and tile and spread over their words in registers. exl3 is
rotated within groups: the caller rotates the query before and the output after.
"""

import torch

from realkernels.attend.launch_words import (
    LEAST_ASYNCHRONOUS,
    Codes,
    launch_words,
    plan_columns,
    plan_rows,
    plan_small,
    plan_wide,
    wide_is_less,
)
from realkernels.attend.plan import TilePlan, checked_call, is_large, tile_tokens
from realkernels.attend.splits import Workspace
from realkernels.attend.word_tiles import GROUPS

GROUP_ELEMENTS = 32
CODES = {
    "q4_0": Codes(per_word=4, zero=8.0, ggml=True),
    "q8_0": Codes(per_word=2, zero=128.0, flip=128),
    "exl3_4": Codes(per_word=4, zero=7.5, unit=1 / 8),
    "exl3_8": Codes(per_word=2, zero=127.5, unit=1 / 128),
}


def plan_words(
    *, query_rows: int, head_dim: int, device: torch.device, aligned: int = 16,
    key_codes: Codes = CODES["q4_0"], value_codes: Codes = CODES["q4_0"],
) -> TilePlan:  # fmt: skip
    """The fastest plan measured on an H200 (head_dim 256), and one that fits where shared memory is 100 KiB.

    `query_rows` is query tokens x query heads of a KV head; more than 24 or 32 are cut into blocks. Rows `aligned` to
    2 bytes cannot be copied asynchronously: they pass through registers, which a wide plan has none left for.
    """
    wide_codes = 2 in {key_codes.per_word, value_codes.per_word}
    if not is_large(device):
        return plan_small(query_rows=query_rows, head_dim=head_dim, wide_codes=wide_codes)
    alone = query_rows <= 8 and not wide_codes
    if aligned < LEAST_ASYNCHRONOUS and not alone and not wide_codes:
        return plan_rows(query_rows=query_rows, head_dim=head_dim)
    if aligned >= LEAST_ASYNCHRONOUS and wide_is_less(query_rows, sets=3 if wide_codes else 2):
        return plan_wide(head_dim=head_dim)
    return plan_columns(
        query_rows=query_rows, tile=tile_tokens(head_dim, of_256=64), num_warps=2 if alone else 4,
        per_multiprocessor=4 if alone else 2,
    )  # fmt: skip


def attend_groups(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_scale: torch.Tensor, value_scale: torch.Tensor,
    page_table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, workspace: Workspace, *,
    key_codes: Codes, value_codes: Codes, softmax_scale: float, plan: TilePlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of each sequence's newest q_tokens tokens over groups of 32 codes, into `out`, in the stored basis.

    query and out [batch, q_tokens, query_heads, head_dim]; keys and values uint8 [pages, kv_heads, page_tokens, groups,
    16 or 32] with even strides, the last 1 (rows without gaps and of multiples of 4 bytes let loads be asynchronous);
    key_scale and value_scale fp16 [pages, kv_heads, page_tokens, groups] with equal strides. page_table int32 [batch,
    max_pages], lengths int32 [batch], new tokens included. Query i of q sees the first lengths - q + i + 1 tokens; one
    that sees none gets zeros. `workspace` comes from the plan (`plan_words` where none is given). Two launches, no host
    synchronisation; page numbers and lengths are trusted.
    """
    words = (keys.view(torch.int16), values.view(torch.int16))
    first = words[0][:, :, :, 0]
    call = checked_call(
        query, first, first, page_table, lengths, out, workspace, width=GROUP_ELEMENTS // key_codes.per_word
    )
    if plan is None:
        plan = plan_words(
            query_rows=call.query_rows, head_dim=call.head_dim, device=query.device, key_codes=key_codes,
            value_codes=value_codes,
        )  # fmt: skip
    shape = (*keys.shape[:3], call.head_dim // GROUP_ELEMENTS)
    for part, codes in zip(words, (key_codes, value_codes), strict=True):
        if tuple(part.shape) != (*shape, GROUP_ELEMENTS // codes.per_word) or part.stride(4) != 1:
            raise ValueError(f"words {tuple(part.shape)} {part.stride()} are not of {shape} groups")
    if tuple(key_scale.shape) != shape or (key_scale.shape, key_scale.stride()) != (
        value_scale.shape, value_scale.stride(),
    ):  # fmt: skip
        raise ValueError(f"scales {tuple(key_scale.shape)} {key_scale.stride()} and {value_scale.stride()}")
    return launch_words(
        call, query, words, (key_scale, value_scale, value_scale), page_table, lengths, out, workspace, plan,
        form=GROUPS, softmax_scale=softmax_scale, key_codes=key_codes, value_codes=value_codes,
    )  # fmt: skip
