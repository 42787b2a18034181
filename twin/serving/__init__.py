"""Serving: continuous batching as vLLM's V1 scheduler does it, step by step, with costs and blocks from outside.

`engine.simulate_serving(requests, costs, pool, limits)` is the door. What it leaves out, on purpose:

- One engine, first come first served: no priorities, no data or pipeline parallelism, no time between steps.
- A request ends with its last output token: nobody aborts. Only `reserve_output` knows its length beforehand.
- Preemption recomputes. Of a preempted sequence only its shared prefix may still be cached, not its own blocks.
- Prefixes are shared by id, and only within prompts: generated tokens are not offered to later requests. A piece of
  prefix is evicted whole, least recently used first, and only while nobody uses it.
- With speculation every sequence gains `tokens_per_step` in each of its steps: tokens come out whole (a running sum,
  rounded down), while the context in the step cost grows by the mean. Draft slots are the query tokens of one step.
- A decode step is affine in the cached tokens for a given number of sequences; the pool has no watermark.
- No more sequences run than the token budget can decode in one step (`batched_tokens // (1 + speculative)`).
"""
