"""The kernels' protocol on CUDA, over the Triton kernels of this room, with the plan that was fastest on an H200."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from realkernels.backend import Copies, Mode, QsaCache, Tier
from realkernels.cache import PlaneCache, plane_cache
from realkernels.gather import GatherBuffers, GatherPlan, gather_attend
from realkernels.layouts import Place, PlaneSpec, layout_of_tier
from realkernels.pooling_kernel import pool_blocks_on_device
from realkernels.prefill import PrefillBuffers, Staging, attend_in_place, select_rows
from realkernels.selection import SCORE_TILE, SelectionBuffers, select_blocks
from realkernels.shape import QsaShape
from realkernels.steps import DecodeBase, PrefillBase
from realkernels.timing import capture, clock_seconds, event_seconds

GATHER_PLAN = GatherPlan(blocks_per_split=8, num_warps=4)
SELECTION_PROGRAMS_PER_SM = 2
PREFILL_TILE, PREFILL_WARPS = 32, 4


class TritonDecodeStep(DecodeBase):
    """One token: five launches a layer, nothing that waits, so that all layers fit one CUDA graph."""

    def __init__(self, cache: QsaCache, *, end: int, device: torch.device, dtype: torch.dtype, programs: int) -> None:
        super().__init__(cache, end=end, device=device, dtype=dtype)
        blocks = cache.shape.blocks(end)
        self._programs = min(programs, -(-blocks // SCORE_TILE))
        self._selection = SelectionBuffers.allocate(blocks, device)
        self._gather = GatherBuffers.allocate(cache.shape, GATHER_PLAN, device)

    def select_layer(self, layer: int) -> None:
        """Score, pick, finish."""
        self._select_into(layer, self.selected[layer])

    def _select_into(self, layer: int, selected: torch.Tensor) -> None:
        select_blocks(
            self.index_query[layer], self.pooled(layer), selected, self._selection, self.cache.shape,
            programs=self._programs,
        )  # fmt: skip

    def gather_layer(self, layer: int) -> None:
        """Attend in splits, merge."""
        gather_attend(
            self.query[layer], self.cache.keys[layer], self.cache.values[layer], self.selected[layer], self.end,
            self.output[layer], self._gather, self.cache.shape, GATHER_PLAN,
        )  # fmt: skip

    def scores(self, layer: int) -> torch.Tensor:
        """By running the selection once more, into nowhere."""
        self._select_into(layer, torch.empty_like(self.selected[layer]))
        return self._selection.scores


class TritonPrefillChunk(PrefillBase):
    """One chunk of one layer; staged, the copies of a GPU run on a stream of their own if overlapped."""

    def __init__(
        self, cache: QsaCache, *, layer: int, past: int, rows: int, mode: Mode, bucket_tokens: int, copies: Copies,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(
            cache, layer=layer, past=past, rows=rows, mode=mode, bucket_tokens=bucket_tokens, copies=copies,
            device=device, dtype=dtype,
        )  # fmt: skip
        self._staging: Staging | None = None
        if mode == "staged":
            self._staging = Staging(
                bucket_tokens=bucket_tokens, shape=cache.shape, dtype=dtype, device=device, copies=copies,
                tile=PREFILL_TILE, num_warps=PREFILL_WARPS,
            )  # fmt: skip
            self._carried = PrefillBuffers.allocate(rows, cache.shape, device)

    def select(self) -> None:
        """Selection of every row."""
        self.selection.copy_(
            select_rows(self.index_query, self.cache.pooled_keys[self.layer], self.past, self.cache.shape)
        )

    def run(self) -> None:
        """Attention of every row."""
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        if self._staging is None:
            attend_in_place(
                self.query, keys, values, self.selection, self.past, self.output, self.cache.shape,
                tile=PREFILL_TILE, num_warps=PREFILL_WARPS,
            )  # fmt: skip
            return
        read = slice(0, self.read_tokens)
        self._staging.attend(
            self.query, keys[read], values[read], self.selection, self.past, self.output, self._carried
        )


class TritonBackend:
    """`backend.Backend` on one CUDA device, which it makes the current one.

    RuntimeError in one line where the device is not there. For tests also torch.device("cpu"), if TRITON_INTERPRET=1.
    """

    name = "triton"
    rounds = 1

    def __init__(self, device: torch.device, *, dtype: torch.dtype = torch.float16) -> None:
        self.interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        self.device = device if self.interpreted else usable_device(device)
        self.dtype = dtype
        self._programs = 4
        if not self.interpreted:
            sms: int = torch.cuda.get_device_properties(self.device).multi_processor_count
            self._programs = SELECTION_PROGRAMS_PER_SM * sms

    @contextmanager
    def cache(
        self, shape: QsaShape, *, layers: int, tokens: int, tier: Tier, huge_pages: bool = True
    ) -> Iterator[PlaneCache]:
        """Planes for `layers` layers. RuntimeError in one line where a memory is too small: what it needs and has."""
        for name in ("head_dim", "index_dim"):
            width = getattr(shape, name)
            if width < 16 or width & (width - 1):
                raise ValueError(f"{name} is {width}: these kernels take powers of two from 16 on")
        spec = PlaneSpec(shape=shape, layers=layers, tokens=tokens, dtype=self.dtype)
        place = Place(device=self.device, huge_pages=huge_pages)
        layout = layout_of_tier(tier)
        planes = ("pooled_keys",) if tier == "host" else ("keys", "values", "raw_keys", "pooled_keys")
        with ExitStack() as stack:
            with self._room(f"a cache of {tokens} tokens", layers * spec.layer_bytes(*planes)):
                cache = stack.enter_context(plane_cache(layout, spec, place, pool_blocks_on_device))
            yield cache

    @contextmanager
    def _room(self, what: str, nbytes: int) -> Iterator[None]:
        """Say in one line what did not fit."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            raise RuntimeError(
                f"{what} needs {nbytes / 2**30:.2f} GiB of VRAM, {torch.cuda.get_device_name(self.device)} has "
                f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB free: try a shorter context or fewer layers"
            ) from None

    def decode_step(self, cache: QsaCache, *, end: int) -> TritonDecodeStep:
        """A step for the token at position `end` - 1; `capture` its `run` for one graph of all layers."""
        shape = cache.shape
        splits = GATHER_PLAN.splits(shape)
        with self._room("a decode step", 8 * shape.blocks(end) + 4 * splits * shape.query_heads * (shape.head_dim + 2)):
            return TritonDecodeStep(cache, end=end, device=self.device, dtype=self.dtype, programs=self._programs)

    def prefill_chunk(
        self, cache: QsaCache, *, layer: int, past: int, rows: int, mode: Mode, bucket_tokens: int = 0,
        copies: Copies = "overlapped",
    ) -> TritonPrefillChunk:  # fmt: skip
        """A chunk of one layer, with queries and selection of seed 0."""
        shape = cache.shape
        scored = min(rows, 1024) * shape.blocks(past + rows) * (shape.index_heads * self.dtype.itemsize + 4)
        with self._room(f"a prefill chunk of {rows} rows (mostly its scores)", scored):
            chunk = TritonPrefillChunk(
                cache, layer=layer, past=past, rows=rows, mode=mode, bucket_tokens=bucket_tokens, copies=copies,
                device=self.device, dtype=self.dtype,
            )  # fmt: skip
            chunk.refresh(0)
            return chunk

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """A CUDA graph's replay."""
        return work if self.interpreted else capture(work, self.device).replay

    def seconds(
        self, work: Callable[[], object], *, repeats: int, warm_up: int = 3,
        before: Callable[[int], object] | None = None,
    ) -> list[float]:  # fmt: skip
        """Seconds of each repeat, between events on the current stream."""
        if self.interpreted:
            return clock_seconds(work, repeats=repeats, warm_up=warm_up, before=before)
        return event_seconds(work, repeats=repeats, warm_up=warm_up, before=before)


def usable_device(device: torch.device) -> torch.device:
    """`device` with its number, made current. RuntimeError in one line where there is none that kernels can run on."""
    if device.type != "cuda":
        raise RuntimeError(f"no kernels for device {device}: there are cuda and cpu")
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA: install a CUDA build, or use device cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old driver is reported below, once
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise RuntimeError(f"no usable GPU: {_why_not()}; use device cpu to go without")
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= found:
        raise RuntimeError(f"there is no GPU {number}: this machine has {found}, numbered from 0")
    usable = torch.device("cuda", number)
    major, minor = torch.cuda.get_device_capability(usable)
    if major < 7:
        name = torch.cuda.get_device_name(usable)
        raise RuntimeError(f"{name} has compute capability {major}.{minor}; the kernels need 7.0: use device cpu")
    torch.cuda.set_device(usable)
    return usable


def _why_not() -> str:
    """What torch says about a CUDA that does not start, cut to its first sentence."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    return "torch sees no device"
