"""Every operation as a timed call (`call.TimedCall`): run, poison, finite, error, verify; calls, bytes and operations.

Where a class takes a `cache`, the caller opens and closes it: `caches.qsa.qsa_cache`, which `fill_random(seed)` fills,
for the classes of `sparse` and `page_images`; `caches.interleaved.interleaved_cache`, which is filled, for
`sparse.GatherBlocks`; and `disk_rows.open_table` for `disk_rows`. Every `device` here is a `torch.device`.

The clock is `realkernels.device.open_device(name)`: `seconds(capture(call.run), repeats=..., before=call.poison)`;
`device.host_seconds(call.run)` where a call is not `capturable` (`disk_rows`, `page_images`).
`PrefillSelect` and `PrefillAttend` also have `blank()`, which poisons outputs alone: a fresh selection of a whole chunk
before each repeat would take longer than what is timed, and leave other caches behind.
"""
