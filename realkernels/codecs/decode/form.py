"""What a codec declares for decode attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from realkernels.kernels.split_kv import PlanCase, TilePlan, Workspace


@dataclass(frozen=True, kw_only=True)
class DecodeForm:
    """The loop that reads a codec's cache, and what the codec is within it."""

    loop: Callable[..., torch.Tensor]
    """A function of `realkernels/kernels/decode_*.py`."""
    plan: Callable[[PlanCase], TilePlan]
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the loop is given of the codec."""
    paged: bool = False
    """The loop is told the tokens of a page: planes of tiles do not say it."""
    other_splits: int = 0
    """Splits of a sequence that do not read its run of tiles: KVarN's first, which reads the sidecar."""
    least_capability: tuple[int, int] = (8, 0)

    def attend(
        self, query: torch.Tensor, views: Mapping[str, torch.Tensor], page_table: torch.Tensor, lengths: torch.Tensor,
        out: torch.Tensor, workspace: Workspace, *, plan: TilePlan, page_tokens: int, softmax_scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """Attention over the codec's `views` into `out`, in the stored basis; see the loop for shapes."""
        options = {**self.options, "page_tokens": page_tokens} if self.paged else self.options
        return self.loop(
            query, views, page_table, lengths, out, workspace, plan=plan, softmax_scale=softmax_scale, **options
        )
