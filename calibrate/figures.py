"""Every figure that can be predicted, by the name that a case gives it, with the unit that it comes in."""

from collections.abc import Callable

from msgspec import Struct

from calibrate import memory_figures as memory
from calibrate import time_figures as timed
from calibrate.estimates import Asked, Estimate


class Figure(Struct, frozen=True, kw_only=True):
    """One predictable figure."""

    unit: str
    estimate: Callable[[Asked], Estimate]
    paired: bool = False
    """Whether it sets one question against another."""


FIGURES = {
    "link_rate": Figure(unit="GB/s", estimate=timed.link_rate),
    "vram_rate": Figure(unit="GB/s", estimate=timed.vram_rate),
    "decode": Figure(unit="tok/s", estimate=timed.decode),
    "decode_step": Figure(unit="ms", estimate=timed.decode_step),
    "decode_drop": Figure(unit="%", estimate=timed.decode_drop, paired=True),
    "decode_link_bytes": Figure(unit="MiB", estimate=timed.decode_link_bytes),
    "decode_gather": Figure(unit="ms", estimate=timed.decode_gather),
    "pooled_scan": Figure(unit="ms", estimate=timed.pooled_scan),
    "prefill": Figure(unit="tok/s", estimate=timed.prefill),
    "prefill_gather": Figure(unit="min", estimate=timed.prefill_gather),
    "time_to_context": Figure(unit="min", estimate=timed.time_to_context),
    "vram_total": Figure(unit="GiB", estimate=memory.vram_total),
    "vram_loaded": Figure(unit="GiB", estimate=memory.vram_loaded),
    "vram_free": Figure(unit="GiB", estimate=memory.vram_free),
    "vram_left": Figure(unit="GiB", estimate=memory.vram_left),
    "tokens_of_vram_left": Figure(unit="tokens", estimate=memory.tokens_of_vram_left),
    "kv_bytes_per_token": Figure(unit="KiB", estimate=memory.kv_bytes_per_token),
    "kv_vram_bytes_per_token": Figure(unit="KiB", estimate=memory.kv_vram_bytes_per_token),
    "kv_host_bytes_per_token": Figure(unit="KiB", estimate=memory.kv_host_bytes_per_token),
    "max_context": Figure(unit="tokens", estimate=memory.max_context),
    "context_that_fits": Figure(unit="tokens", estimate=memory.context_that_fits),
    "context_read_whole": Figure(unit="tokens", estimate=memory.context_read_whole),
    "native_context": Figure(unit="tokens", estimate=memory.native_context),
    "staging_that_fits": Figure(unit="MiB", estimate=memory.staging_that_fits),
    "pooled_scan_bytes": Figure(unit="MiB", estimate=memory.pooled_scan_bytes),
    "naive_chunk_bytes": Figure(unit="GiB", estimate=memory.naive_chunk_bytes),
    "staged_ratio": Figure(unit="x", estimate=memory.staged_ratio),
}
