"""Every operation as a timed call (`call.TimedCall`): run, poison, finite, error, verify; calls, bytes and operations.

attend_decode
    AttendDecode(codec_name, *, arrangement=None, shape=None, batch=1, ctx_tokens, q_tokens=1, caches=None, device,
    seed=0): decode attention over a paged cache of a codec
append
    Append(codec_name, *, arrangement=None, shape=None, tokens, past_tokens=0, layers=8, fused=None, device, seed=0):
    K and V of new tokens quantised into a layer's cache
prefill
    AttendChunk(codec_name, *, arrangement=None, shape=None, q_tokens, ctx_tokens, kv_chunk_tokens=8192, caches=None,
    dtype=None, device, seed=0): attention of a prefill chunk over a paged cache of a codec
    Dequantise(codec_name, *, arrangement=None, shape=None, tokens, kv_chunk_tokens=8192, cache=None, dtype=None,
    device, seed=0): such a cache, kv chunk by kv chunk
sparse
    DecodeSelect(cache, *, ctx_tokens): selection of one layer for a new token
    DecodeGather(cache, *, ctx_tokens): sparse attention of one layer over a fresh selection
    DecodeStep(cache, *, ctx_tokens, backbone_bytes=0): both in all layers (`calls` is 1), behind a stand-in backbone
    PrefillSelect(cache, *, ctx_tokens, q_tokens): selection of every token of a chunk
    PrefillAttend(cache, *, ctx_tokens, q_tokens, bucket_tokens=0, copies="overlapped"): sparse attention of a chunk of
    one layer, in place (0) or staged through buckets of device memory
gather_blocks
    GatherBlocks(cache, *, ctx_tokens): sparse attention of one layer over interleaved blocks
products
    Product(*, tokens, rows, columns, dtype, beyond_bytes, device)        products with matrices of their own, in turn
library
    Linear(shape, *, tokens, weights, dtype, device): the four matrix products of a layer
    Elementwise(shape, *, tokens, layers, dtype, device, ops=None): what lies between them
    PlainAppend(shape, *, tokens, layers, dtype, device, ops=None): K and V of new tokens copied to their slots
    FlashAttention(shape, *, batch, q_tokens, past_tokens, caches, dtype, device): flash attention over one cache
    Sampling(*, tokens, vocab, device): one token from each row of logits
    DenseLayers(shape, *, layers, batch, q_tokens, past_tokens, dtype, device, ops=None): whole dense layers
disk_rows
    ReadRows(table, *, reads, warm=False): random rows of a table in RAM or in a file
page_images
    EvictPages(cache, *, pages), RestorePages(cache, *, pages): a page copied to its image in RAM, or back

Where a class takes a `cache`, the caller opens and closes it, by these context managers:
`caches.qsa.qsa_cache(shape, *, layers, tokens, tier, device, dtype=float16, huge_pages=True, folder=None)`, which
`fill_random(seed)` fills, for `sparse` and `page_images`; `caches.interleaved.interleaved_cache(codec_name, *, shape,
layers, tokens, device, folder=None)`, which is filled, for `gather_blocks`; and `disk_rows.open_table(file, source, *,
threads=8)` for `disk_rows`. Every `device` here is a `torch.device`.

The clock is `realkernels.device.open_device(name)`: `seconds(capture(call.run), repeats=..., before=call.poison)`;
`device.host_seconds(call.run)` where a call is not `capturable` (`disk_rows`, `page_images`).
`PrefillSelect` and `PrefillAttend` also have `blank()`, which poisons outputs alone: a fresh selection of a whole chunk
before each repeat would take longer than what is timed, and leave other caches behind.
"""
