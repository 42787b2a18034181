"""Sparse decode attention over blocks in records in plain torch, for any format: what a computer without a GPU runs."""

import torch

from realkernels.codecs import Codec as Format
from realkernels.codecs import Planes
from realkernels.shape import QsaShape


def attend_records(
    query: torch.Tensor, planes: Planes, selected: torch.Tensor, end: int, output: torch.Tensor, fmt: Format,
    shape: QsaShape,
) -> None:  # fmt: skip
    """Attention of the token at position `end` - 1 over `selected` blocks and the open tail, into `output`.

    query and output [query_heads, head_dim] in the model's basis; planes of `blocks.block_planes`; selected int32
    [topk], trusted. A NaN in a selected row reaches the heads that share its KV head and nobody else; nothing but the
    selected rows is read. ValueError for a context with fewer blocks than are selected, or beyond the planes.
    """
    if end // shape.ratio < shape.topk:
        raise ValueError(f"a context of {end} tokens has fewer than {shape.topk} blocks: it is read whole")
    if end > planes.slots or planes.page_tokens != shape.ratio:
        raise ValueError(
            f"a context of {end} tokens in blocks of {shape.ratio} does not fit {planes.pages} blocks of "
            f"{planes.page_tokens}"
        )
    chosen = (selected.long()[:, None] * shape.ratio + torch.arange(shape.ratio)).flatten()
    slots = torch.cat([chosen, torch.arange(end // shape.ratio * shape.ratio, end)])
    keys, values = fmt.dequantise(planes, slots, checked=False)  # [tokens, kv_heads, head_dim] in the stored basis
    grouped = fmt.rotate_query(query.float()).view(shape.kv_heads, shape.group, shape.head_dim)
    scores = grouped @ keys.permute(1, 2, 0) * shape.head_dim**-0.5
    attended = torch.softmax(scores, dim=-1) @ values.transpose(0, 1)
    output.copy_(fmt.rotate_output(attended.reshape(shape.query_heads, shape.head_dim)))
