"""One measurement of formats on sets of heads, each against attention in float64 (`errors.py`).

What is published of answers (`twin/answers/quality.py`) is carried beside and never enters a measured figure.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from calibrate.machine.description import check_device, cpu_name, open_checked
from calibrate.quality.errors import ABSMAX_INT4, Concentration, FormatErrors, errors_in, together, truth_of
from calibrate.quality.heads import Source, dumped, made_up
from twin.answers.comparison import Quality, published_quality
from twin.errors import BadValue, Impossible
from twin.formats import is_exl3, kv_format
from twin.models import ModelSpec, load_model

Progress = Callable[[int, int, str], None]
"""(formats done, formats in all, what is next), over all heads."""
DEFAULT_MODEL = "qwen3.8-27b"
DEFAULT_TOKENS = 4096
REFERENCES = ("fp16", ABSMAX_INT4)
"""Always shown: what nobody notices, and what everybody could write."""
SHOWN_EXL3 = tuple(f"exl3_k{bits}v{bits}" for bits in (8, 6, 4, 3, 2))

MOST_WORKERS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """All formats on one set of heads."""

    name: str
    about: str
    tokens: int
    heads: int
    """KV heads that were measured."""
    queries: int
    """Of all heads."""
    generated: bool
    """Whether the queries were made up."""
    concentration: Concentration
    formats: tuple[FormatErrors, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """The answer of one command."""

    tensors: Path | None
    model: ModelSpec | None
    device: str
    device_name: str
    torch: str
    seed: int | None
    """None where nothing was made up."""
    kv_heads: int
    head_dim: int
    chosen: str
    """The heads that are shown in full."""
    samples: tuple[Sample, ...]
    token_bytes: dict[str, int]
    """Of K and V of a token in a layer, scales included, for all KV heads."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why a format was not measured."""

    @property
    def pooled(self) -> tuple[FormatErrors, ...]:
        """Over all layers of a file; empty where there is one, or where kinds were made up."""
        if self.tensors is None or len(self.samples) == 1:
            return ()
        layers = zip(*(sample.formats for sample in self.samples), strict=True)
        return tuple(replace(rows[0], sums=together([row.sums for row in rows])) for rows in layers)

    @property
    def published(self) -> dict[str, tuple[Quality, ...]]:
        """By format, for the model that was named or is taken; carried, not measured."""
        if self.model is None:
            return {}
        return {name: published_quality(self.model, name) for name in self.token_bytes}


def measure_quality(
    *, kv_dtype: str | None = None, tensors: Path | None = None, heads: str | None = None, model: str | None = None,
    tokens: int | None = None, seed: int | None = None, device: str = "cpu", progress: Progress | None = None,
) -> Measured:  # fmt: skip
    """Measure the formats `kv_dtype` ("a,b,..."; None: all) on heads of a file, or on all kinds of made-up ones.

    `model`: whose shape is made up, and of whose answers published figures are carried. Raises
    BadValue, UnknownName, BadFile and Impossible, each in one line.
    """
    asked = None if kv_dtype is None else [kv_format(name.strip()).name for name in kv_dtype.split(",")]
    check_device(device)
    if seed is not None and seed < 0:
        raise BadValue(f"--seed: {seed} is outside the range from 0 on")
    if tensors is None:
        source, chosen = made_up(load_model(model or DEFAULT_MODEL), tokens or DEFAULT_TOKENS, seed or 0), heads
    else:
        if heads is not None:
            raise BadValue("--heads means nothing beside --tensors: its heads are not made up")
        source, chosen = dumped(tensors, load_model(model) if model else None, tokens, seed), None
    version, device_name = _opened(device)
    try:
        samples, left_out = _measure(source, _names(asked, source), device, progress or (lambda *_: None))
    except (MemoryError, RuntimeError) as refused:
        if isinstance(refused, RuntimeError) and "memory" not in str(refused):
            raise
        raise Impossible(f"{device} has too little memory for this", hint="--tokens measures fewer") from None
    shown = [row.name for row in samples[0].formats]
    if left_out and not set(shown) - set(REFERENCES):
        raise Impossible(next(iter(left_out.values())))
    return Measured(
        tensors=tensors, model=source.model, device=device, device_name=device_name, torch=version,
        seed=seed or 0 if any(sample.generated for sample in samples) else None,
        kv_heads=source.kv_heads, head_dim=source.head_dim, chosen=chosen or samples[0].name, samples=samples,
        token_bytes={name: _token_bytes(name, source.kv_heads, source.head_dim) for name in shown},
        left_out=left_out,
    )  # fmt: skip


def _opened(device: str) -> tuple[str, str]:
    """The version of torch and the device's name; Impossible where either is not there."""
    try:
        import torch  # noqa: PLC0415
    except ImportError as missing:
        raise Impossible(f"{missing.name or 'torch'} is not installed", hint="pip install 'kv-twin[kernels]'") from None
    if device == "cpu":
        return str(torch.__version__), cpu_name()
    return str(torch.__version__), str(torch.cuda.get_device_name(open_checked(device, Impossible).device))


def _names(asked: Sequence[str] | None, source: Source) -> list[str]:
    """References, then what was asked for, or everything there is from the largest to the smallest."""
    from realkernels.codecs import codec_names  # noqa: PLC0415

    if asked is None:
        shown = [name for name in codec_names() if not is_exl3(name) or name in SHOWN_EXL3]
        size = {"kv_heads": source.kv_heads, "head_dim": source.head_dim}
        sizes = {name: kv_format(name).plane_bytes(**size) for name in shown}
        asked = sorted(shown, key=lambda name: (-sizes[name], name))
    return list(dict.fromkeys([*REFERENCES, *asked]))


def _token_bytes(name: str, kv_heads: int, head_dim: int) -> int:
    """Of the planes; the reference has codes of half a byte and a float32 scale for each token, head and plane."""
    if name == ABSMAX_INT4:
        return 2 * kv_heads * (-(-head_dim // 2) + 4)
    from realkernels.codecs import codec_named  # noqa: PLC0415

    return codec_named(name).token_bytes(kv_heads, head_dim)


def _measure(
    source: Source, names: Sequence[str], device: str, progress: Progress
) -> tuple[tuple[Sample, ...], dict[str, str]]:
    """Every format on every set of heads; one that cannot be kept in one of them is left out of all."""
    samples: list[Sample] = []
    left_out: dict[str, str] = {}
    total = len(names) * len(source.makers)
    with _side_by_side(device) as each:
        for number, make in enumerate(source.makers):
            progress(number * len(names), total, "")
            heads = make()
            truth = truth_of(heads, device)
            if not truth.output.any():
                raise Impossible(f"{heads.name}: attention's output is zero: there is nothing to compare with")
            rows: list[FormatErrors] = []
            for done, (name, found) in enumerate(each(partial(errors_in, truth), names)):
                progress(number * len(names) + done, total, f"{heads.name}: {name}")
                if isinstance(found, FormatErrors):
                    rows.append(found)
                else:
                    left_out.setdefault(name, f"{found} ({heads.name})" if len(source.makers) > 1 else found)
            tokens, kv_heads, _ = heads.keys.shape
            samples.append(Sample(
                name=heads.name, about=heads.about, tokens=tokens, heads=kv_heads,
                queries=kv_heads * heads.queries.shape[1], generated=heads.generated,
                concentration=truth.concentration, formats=tuple(rows),
            ))  # fmt: skip
    kept = (tuple(row for row in sample.formats if row.name not in left_out) for sample in samples)
    return tuple(replace(sample, formats=rows) for sample, rows in zip(samples, kept, strict=True)), left_out


@contextmanager
def _side_by_side(device: str) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map`: on a CPU in threads of one core each, which for tensors of this size is faster than shared work."""
    if device != "cpu":
        yield map
        return
    import torch  # noqa: PLC0415

    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(min(MOST_WORKERS, os.cpu_count() or 1))
    torch.set_num_threads(1)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
