"""Every figure that can be predicted, by the name that a case gives it, with the unit that it comes in."""

from collections.abc import Callable

from msgspec import Struct

from calibrate import memory_figures as memory
from calibrate import pool_figures as pool
from calibrate import serving_figures as served
from calibrate import time_figures as timed
from calibrate.estimates import Asked, Estimate


class Figure(Struct, frozen=True, kw_only=True):
    """One predictable figure."""

    unit: str
    estimate: Callable[[Asked], Estimate]
    paired: bool = False
    """Whether it sets one question against another."""
    served: bool = False
    """Whether it is of many requests, so that a case gives a workload."""


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
    "ttft": Figure(unit="s", estimate=timed.ttft),
    "time_per_token": Figure(unit="ms", estimate=timed.time_per_token),
    "attention_per_layer": Figure(unit="ms", estimate=timed.attention_per_layer),
    "total_time": Figure(unit="s", estimate=served.total_time, served=True),
    "throughput": Figure(unit="tok/s", estimate=served.throughput, served=True),
    "inter_token": Figure(unit="ms", estimate=served.inter_token, served=True),
    "residents": Figure(unit="requests", estimate=served.residents, served=True),
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
    "kv_bytes_per_token_per_layer": Figure(unit="B", estimate=pool.kv_bytes_per_token_per_layer),
    "kv_bytes_of_token": Figure(unit="B", estimate=pool.kv_bytes_of_token),
    "kv_pool": Figure(unit="tokens", estimate=pool.kv_pool),
    "concurrency": Figure(unit="x", estimate=pool.concurrency),
    "block_tokens": Figure(unit="tokens", estimate=pool.block_tokens),
    "page": Figure(unit="MiB", estimate=pool.page_mib),
    "window_blocks": Figure(unit="blocks", estimate=pool.window_blocks),
    "window_page_use": Figure(unit="%", estimate=pool.window_page_use),
    "window_block_tokens": Figure(unit="tokens", estimate=pool.window_block_tokens),
    "kv_memory": Figure(unit="GiB", estimate=pool.kv_memory),
    "runs_out_of_memory": Figure(unit="", estimate=pool.runs_out_of_memory),
    "starts": Figure(unit="", estimate=pool.starts),
    "staged_ratio": Figure(unit="x", estimate=memory.staged_ratio),
}
