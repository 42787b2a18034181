"""Decode attention over the sequences of a cache by the fused kernel of its codec.

A format whose codec declares no form has no kernel on a GPU: `missing` says so, nothing stands in.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from triton.errors import TritonError

from realkernels.bounds import check_pages
from realkernels.codecs.decode import FORMS
from realkernels.format_pool import PAGE_TOKENS, NoKernel, Pool
from realkernels.formats import Format
from realkernels.kernels.split_kv import PlanCase, TilePlan, alignment


def missing(fmt: Format, device: torch.device) -> str:
    """Empty, or in one line why no kernel reads this format on `device`."""
    form = FORMS.get(fmt.name)
    if form is None:
        return f"no fused kernel reads {fmt.name}: there are {', '.join(FORMS)}"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else form.least_capability
    if capability < form.least_capability:
        needs, has = (".".join(str(part) for part in each) for each in (form.least_capability, capability))
        return f"the kernel of {fmt.name} needs compute capability {needs}, this device has {has}"
    return ""


def plan_for(pool: Pool, q_rows: int) -> TilePlan:
    """How the codec's kernel is divided into thread blocks for `q_rows` query rows of a KV head."""
    views = pool.format.views(pool.planes)
    case = PlanCase.on(
        pool.table.device, q_rows=q_rows, head_dim=pool.shape.head_dim, tile_tokens=pool.format.tile_tokens,
        aligned=alignment(views["key_data"], views["value_data"]),
        per_token="key_scale" in views and views["key_scale"].dim() > 1,
    )  # fmt: skip
    return FORMS[pool.format.name].plan(case)


def attentions(
    pool: Pool, parts: Sequence[range], *, q_tokens: int
) -> list[Callable[[torch.Tensor, torch.Tensor], object]]:
    """A call for each part of the pool's sequences, all of one size; each takes (query, out) in the stored basis.

    IndexError, before anything is launched, for a page table that leaves the planes.
    """
    form, shape, device = FORMS[pool.format.name], pool.shape, pool.table.device
    plan, batch = plan_for(pool, shape.group * q_tokens), len(parts[0])
    workspace = plan.workspace(
        batch=batch, q_tokens=q_tokens, **vars(shape), tokens=pool.tokens, other_splits=form.other_splits,
        device=device,
    )  # fmt: skip
    views = pool.format.views(pool.planes)
    lengths = torch.full((batch,), pool.tokens, dtype=torch.int32, device=device)
    for part in parts:
        check_pages(
            pool.table[part.start : part.stop], lengths, pages=pool.planes.pages, page_tokens=pool.planes.page_tokens
        )

    def call(table: torch.Tensor, query: torch.Tensor, out: torch.Tensor) -> None:
        try:
            form.attend(
                query, views, table, lengths, out, workspace, plan=plan, page_tokens=PAGE_TOKENS,
                softmax_scale=shape.head_dim**-0.5,
            )  # fmt: skip
        except TritonError as wrong:
            first = (str(wrong).strip() or type(wrong).__name__).splitlines()[0]
            raise NoKernel(f"the kernel of {pool.format.name} does not start here: {first}") from wrong

    return [partial(call, pool.table[part.start : part.stop]) for part in parts]
