"""Decode attention over the sequences of a cache by the fused kernel of its codec.

A codec that declares no form has no kernel on a GPU: `missing` says so, nothing stands in.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from triton.errors import TritonError

from realkernels.bounds import check_pages
from realkernels.caches.paged import PAGE_TOKENS, NoKernel, PagedCache
from realkernels.codecs import Codec, codec_named, codec_names
from realkernels.kernels.split_kv import PlanCase, TilePlan, alignment


def attended() -> list[str]:
    """Names of the codecs that decode attention reads."""
    return [name for name in codec_names() if codec_named(name).decode_form is not None]


def missing(codec: Codec, device: torch.device) -> str:
    """Empty, or in one line why no kernel reads this codec on `device`."""
    form = codec.decode_form
    if form is None:
        return f"no fused kernel reads {codec.name}: there are {', '.join(attended())}"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else form.least_capability
    if capability < form.least_capability:
        needs, has = (".".join(str(part) for part in each) for each in (form.least_capability, capability))
        return f"the kernel of {codec.name} needs compute capability {needs}, this device has {has}"
    return ""


def plan_for(cache: PagedCache, q_rows: int) -> TilePlan:
    """How the codec's kernel is divided into thread blocks for `q_rows` query rows of a KV head."""
    views = cache.codec.views(cache.planes)
    case = PlanCase.on(
        cache.table.device, q_rows=q_rows, head_dim=cache.shape.head_dim, tile_tokens=cache.codec.tile_tokens,
        aligned=alignment(views["key_data"], views["value_data"]),
        per_token="key_scale" in views and views["key_scale"].dim() > 1,
    )  # fmt: skip
    return cache.codec.decode_form.plan(case)


def attentions(
    cache: PagedCache, parts: Sequence[range], *, q_tokens: int
) -> list[Callable[[torch.Tensor, torch.Tensor], object]]:
    """A call for each part of the cache's sequences, all of one size; each takes (query, out) in the stored basis.

    IndexError, before anything is launched, for a page table that leaves the planes.
    """
    form, shape, device = cache.codec.decode_form, cache.shape, cache.table.device
    plan, batch = plan_for(cache, shape.group * q_tokens), len(parts[0])
    workspace = plan.workspace(
        batch=batch, q_tokens=q_tokens, **vars(shape), tokens=cache.tokens, other_splits=form.other_splits,
        device=device,
    )  # fmt: skip
    views = cache.codec.views(cache.planes)
    lengths = torch.full((batch,), cache.tokens, dtype=torch.int32, device=device)
    for part in parts:
        check_pages(
            cache.table[part.start : part.stop], lengths, pages=cache.planes.pages, page_tokens=cache.planes.page_tokens
        )

    def call(table: torch.Tensor, query: torch.Tensor, out: torch.Tensor) -> None:
        try:
            form.attend(
                query, views, table, lengths, out, workspace, plan=plan, page_tokens=PAGE_TOKENS,
                softmax_scale=shape.head_dim**-0.5,
            )  # fmt: skip
        except TritonError as wrong:
            first = (str(wrong).strip() or type(wrong).__name__).splitlines()[0]
            raise NoKernel(f"the kernel of {cache.codec.name} does not start here: {first}") from wrong

    return [partial(call, cache.table[part.start : part.stop]) for part in parts]
