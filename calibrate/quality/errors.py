"""What keeping K and V in a format does to attention: sums of errors of a set of heads, against float64.

Truth is attention in float64 over the tensors as they were given. A format is held against it by what comes out of its
planes: appended, dequantised, brought back to the model's basis, and attended to in float64 as well, so that nothing
but the format's own rounding is seen.

Beside the formats stands the plain 4-bit cache that everybody knows, `absmax_int4`: for each token, head and plane
x = code x scale with scale = absmax / 7 in float32 and code = round(x / scale) in -7 .. 7, nothing rotated or shifted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from calibrate.quality.heads import SINKS, Heads

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[np.float64]

ABSMAX_INT4 = "absmax_int4"

CHUNK_TOKENS = 512
"""Tokens that are appended or dequantised at once, whole tiles of every format: so few that the caches hold them."""


@dataclass(frozen=True, kw_only=True)
class Concentration:
    """How peaked attention is."""

    effective_tokens: float
    """exp of the entropy, the median over queries."""
    top_share: float
    """Of the strongest token, the mean."""
    first_share: float
    """Of the first 4 tokens together, the mean."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """A set of heads on a device, and its attention in float64."""

    keys: "torch.Tensor"
    """float32 [tokens, kv_heads, head_dim]."""
    values: "torch.Tensor"
    queries: "torch.Tensor"
    """float64 [kv_heads, n, head_dim]."""
    hidden: "torch.Tensor | None"
    """bool [n, tokens]: tokens that a query does not attend to; None: it attends to all."""
    scores: "torch.Tensor"
    """float64 [kv_heads, n, tokens], -inf where hidden."""
    logs: "torch.Tensor"
    """float64 as scores: logarithms of the attention."""
    output: "torch.Tensor"
    """float64 [kv_heads, n, head_dim]."""

    @property
    def concentration(self) -> Concentration:
        """How peaked it is, over all queries of all heads."""
        weights = self.logs.exp()
        entropy = -(weights * self.logs.masked_fill(weights == 0, 0.0)).sum(-1)
        return Concentration(
            effective_tokens=float(np.median(entropy.exp().flatten().cpu().numpy())),
            top_share=float(weights.amax(-1).mean()),
            first_share=float(weights[..., :SINKS].sum(-1).mean()),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Errors of one format, such that those of several heads or layers can be put together.

    The first four hold two numbers: the sum of squared errors, and what they are relative to.
    """

    key: Array
    """To the sum of squares of the truth, as `value` and `output`."""
    value: Array
    output: Array
    score: Array
    """To the number of scores."""
    score_max: Array
    """Of each head."""
    divergence: Array
    """Of each query: Kullback and Leibler's, in nats, of attention over the cache from the true one."""
    cosine: Array
    """Of each query's output and the true one."""


class NotKept(Exception):
    """Heads that a format cannot keep, and why."""


def truth_of(heads: Heads, device: str) -> Truth:
    """Attention in float64 of every query."""
    import torch  # noqa: PLC0415

    keys, values = (torch.from_numpy(rows).to(device) for rows in (heads.keys, heads.values))
    queries = torch.from_numpy(heads.queries).to(device).double()
    visible = torch.from_numpy(heads.visible).to(device)
    tokens = keys.shape[0]
    hidden = torch.arange(tokens, device=device) >= visible[:, None] if int(visible.min()) < tokens else None
    scores = torch.stack([_scores(queries[head], keys[:, head], hidden) for head in range(keys.shape[1])])
    logs = scores.log_softmax(-1)
    output = torch.stack([logs[head].exp() @ values[:, head].double() for head in range(keys.shape[1])])
    return Truth(keys=keys, values=values, queries=queries, hidden=hidden, scores=scores, logs=logs, output=output)


def _scores(queries: "torch.Tensor", keys: "torch.Tensor", hidden: "torch.Tensor | None") -> "torch.Tensor":
    """Float64 [n, tokens]: q k / sqrt(D)."""
    scores = queries @ keys.double().T / sqrt(keys.shape[-1])
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def kept_in(name: str, truth: Truth) -> tuple["torch.Tensor", "torch.Tensor", int]:
    """K and V as they come back from a cache of that format, and how many tokens of it are still in 16 bits.

    Raises NotKept for head sizes or numbers that the format has no room for.
    """
    if name == ABSMAX_INT4:
        return absmax_int4(truth.keys), absmax_int4(truth.values), 0
    keys, values, waiting = _through_planes(name, truth)
    for plane, rows in (("K", keys), ("V", values)):
        lost = ~rows.isfinite()
        if lost.any():
            token, head, channel = lost.nonzero()[0].tolist()
            raise NotKept(f"{plane} of token {token}, head {head}, channel {channel} comes back as no finite number")
    return keys, values, waiting


def absmax_int4(rows: "torch.Tensor") -> "torch.Tensor":
    """Rows as they come back from 4-bit codes."""
    scale = rows.abs().amax(dim=-1, keepdim=True) / 7
    return (rows / scale).nan_to_num(0.0, posinf=0.0, neginf=0.0).round() * scale


def _through_planes(name: str, truth: Truth) -> tuple["torch.Tensor", "torch.Tensor", int]:
    import torch  # noqa: PLC0415

    from realkernels.codecs import codec_named  # noqa: PLC0415

    fmt = codec_named(name)
    tokens, kv_heads, head_dim = truth.keys.shape
    page_tokens = max(16, fmt.tile_tokens)
    try:
        planes = fmt.allocate(-(-tokens // page_tokens), page_tokens, kv_heads, head_dim, truth.keys.device)
    except ValueError as wrong:
        raise NotKept(str(wrong)) from None
    runs = [range(first, min(first + CHUNK_TOKENS, tokens)) for first in range(0, tokens, CHUNK_TOKENS)]
    for run in runs:
        part = slice(run.start, run.stop)
        fmt.append(planes, run, truth.keys[part], truth.values[part])
    back = [fmt.restore(planes, run) for run in runs]
    keys, values = (torch.cat(rows) for rows in zip(*back, strict=True))
    waiting = planes.sidecar.get("present")
    return keys, values, 0 if waiting is None else int(waiting.sum())


def sums_of(truth: Truth, keys: "torch.Tensor", values: "torch.Tensor") -> Sums:
    """Errors of K and V [tokens, kv_heads, head_dim] and of attention over them."""
    return together([_sums_of_head(truth, head, keys[:, head], values[:, head]) for head in range(keys.shape[1])])


def _sums_of_head(truth: Truth, head: int, keys: "torch.Tensor", values: "torch.Tensor") -> Sums:
    scores, true_output = _scores(truth.queries[head], keys, truth.hidden), truth.output[head]
    logs, true_logs = scores.log_softmax(-1), truth.logs[head]
    apart, further, count = scores - truth.scores[head], true_logs - logs, scores.numel()
    if truth.hidden is not None:
        apart, further = apart.masked_fill(truth.hidden, 0.0), further.masked_fill(truth.hidden, 0.0)
        count = int((~truth.hidden).sum())
    output = logs.exp() @ values.double()
    return Sums(
        key=_squares(keys, truth.keys[:, head]),
        value=_squares(values, truth.values[:, head]),
        output=_squares(output, true_output),
        score=np.array([float((apart**2).sum()), count]),
        score_max=np.array([float(apart.abs().max())]),
        divergence=(true_logs.exp() * further).sum(-1).clamp(min=0.0).cpu().numpy(),
        cosine=_cosine(output, true_output).cpu().numpy(),
    )


def _cosine(rows: "torch.Tensor", true_rows: "torch.Tensor") -> "torch.Tensor":
    """Of each row with its true one; where one is zero, 1 if both are and 0 otherwise."""
    lengths = rows.norm(dim=-1) * true_rows.norm(dim=-1)
    same = (rows == true_rows).all(-1).double()
    return ((rows * true_rows).sum(-1) / lengths).where(lengths > 0, same).clamp(-1.0, 1.0)


def _squares(rows: "torch.Tensor", true_rows: "torch.Tensor") -> Array:
    true_rows = true_rows.double()
    return np.array([float(((rows.double() - true_rows) ** 2).sum()), float((true_rows**2).sum())])


def together(parts: Sequence[Sums]) -> Sums:
    """Those of several heads or layers as of one."""
    of = {each.name: [getattr(part, each.name) for part in parts] for each in fields(Sums)}
    added = {name: np.sum(of.pop(name), axis=0) for name in ("key", "value", "output", "score")}
    return Sums(**added, **{name: np.concatenate(arrays) for name, arrays in of.items()})


@dataclass(frozen=True, kw_only=True)
class Errors:
    """What is reported of a format. Relative: root of the summed squares over that of the truth."""

    key_relative_rms: float
    value_relative_rms: float
    score_rms: float
    score_max: float
    kl_mean: float
    kl_p99: float
    output_relative_rms: float
    output_cosine_mean: float
    output_cosine_min: float


def errors_of(sums: Sums) -> Errors:
    """The figures that the sums amount to. Tensors that are zero everywhere are refused before."""
    key, value, output, score = (sqrt(error / base) for error, base in (sums.key, sums.value, sums.output, sums.score))
    return Errors(
        key_relative_rms=key, value_relative_rms=value, output_relative_rms=output,
        score_rms=score, score_max=float(sums.score_max.max()),
        kl_mean=float(sums.divergence.mean()), kl_p99=float(np.percentile(sums.divergence, 99)),
        output_cosine_mean=float(sums.cosine.mean()), output_cosine_min=float(sums.cosine.min()),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class FormatErrors:
    """One format on one set of heads."""

    name: str
    waiting_tokens: int
    """Tokens that are still in 16 bits: a first tile that stays so, and a last one that is not full."""
    sums: Sums

    @cached_property
    def errors(self) -> Errors:
        """The figures."""
        return errors_of(self.sums)


def errors_in(truth: Truth, name: str) -> tuple[str, FormatErrors | str]:
    """The name, and the errors or why there are none."""
    try:
        keys, values, waiting = kept_in(name, truth)
    except NotKept as reason:
        return name, str(reason)
    return name, FormatErrors(name=name, waiting_tokens=waiting, sums=sums_of(truth, keys, values))
