"""Every operation as a timed call (`call.TimedCall`): run, poison, finite, error, verify; calls, bytes and operations.

attend_decode
    AttendDecode(codec_name, *, arrangement, shape, batch, ctx_tokens, q_tokens, caches, device, seed)
        decode attention over a paged cache of a codec
append
    Append(codec_name, *, shape, tokens, layers, device)          K and V of new tokens quantised into a layer's cache
prefill
    AttendChunk(codec_name, *, arrangement, shape, q_tokens, ctx_tokens, ...)             attention of a prefill chunk
    Dequantise(codec_name, *, arrangement, shape, tokens, ...)                   the kv chunks of a cache, dequantised
sparse
    DecodeSelect(cache, *, ctx_tokens)                                          selection of one layer for a new token
    DecodeGather(cache, *, ctx_tokens)                            sparse attention of one layer over a fresh selection
    DecodeStep(cache, *, ctx_tokens, backbone_bytes=0)  both in all layers (`calls` is 1), behind a stand-in backbone
    PrefillSelect(cache, *, ctx_tokens, q_tokens)                                 selection of every token of a chunk
    PrefillAttend(cache, *, ctx_tokens, q_tokens, bucket_tokens=0, copies="overlapped")
        sparse attention of a chunk of one layer: in place (0), or staged through buckets of device memory
gather_blocks
    GatherBlocks(cache, *, ctx_tokens)                           sparse attention of one layer over interleaved blocks
library
    Linear(shape, *, tokens, weights, dtype, device)                               the four matrix products of a layer
    Elementwise(shape, *, tokens, layers, dtype, device)                                        what lies between them
    PlainAppend(shape, *, tokens, layers, dtype, device)                   K and V of new tokens copied to their slots
    FlashAttention(shape, *, batch, q_tokens, past_tokens, caches, dtype, device)       flash attention over one cache
    Sampling(*, tokens, vocab, device)                                                one token from each row of logits
    DenseLayers(shape, *, layers, batch, q_tokens, past_tokens, dtype, device)                     a whole dense layer
disk_rows
    ReadRows(table, *, reads)                                           random rows of a table in RAM or in a file
page_images
    EvictPages(cache, *, pages), RestorePages(cache, *, pages)          a page copied to its image in RAM, or back

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
