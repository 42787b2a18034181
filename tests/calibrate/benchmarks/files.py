"""Files as engines' benchmarks write them, with the keys of their sources; times as a test wants them."""

import json
from pathlib import Path
from typing import Any

LLAMA = {
    "build_commit": "0104b151", "build_number": 6500, "cpu_info": "AMD Ryzen 9", "gpu_info": "NVIDIA GeForce RTX 3090",
    "backends": "CUDA", "model_filename": "/models/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
    "model_type": "llama 8B Q4_K - Medium", "model_size": 4912898304, "model_n_params": 8030261312, "n_batch": 2048,
    "n_ubatch": 512, "n_threads": 16, "cpu_mask": "0x0", "cpu_strict": False, "poll": 50, "type_k": "f16",
    "type_v": "f16", "n_gpu_layers": 99, "n_cpu_moe": 0, "split_mode": "layer", "main_gpu": 0, "no_kv_offload": False,
    "flash_attn": 1, "devices": "auto", "tensor_split": "0.00", "tensor_buft_overrides": "none", "embeddings": False,
    "n_prompt": 0, "n_gen": 0, "n_depth": 0, "test_time": "2026-12-01T10:00:00Z",
}  # fmt: skip
"""A test of llama-bench without its times."""

SERVE = {
    "date": "20261201-100000", "endpoint_type": "openai", "backend": "openai", "label": None,
    "model_id": "llama-3.1-8b", "tokenizer_id": "llama-3.1-8b", "num_prompts": 8,
    "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 1,
    "duration": 6.0, "completed": 8, "failed": 0, "total_input_tokens": 8192, "total_output_tokens": 512,
    "request_throughput": 1.3, "output_throughput": 85.0, "mean_ttft_ms": 40.0, "median_ttft_ms": 41.0,
    "std_ttft_ms": 2.0, "mean_tpot_ms": 6.0, "median_tpot_ms": 6.1, "std_tpot_ms": 0.1,
}  # fmt: skip
"""A server's row of vLLM."""

SERVING = {
    "tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": "inf", "max_concurrency": 1,
    "random_input_len": 1024, "random_output_len": 64, "duration": 6.0, "completed": 8, "total_input_tokens": 8192,
    "total_output_tokens": 512, "total_output_tokens_retokenized": 510, "mean_ttft_ms": 40.0, "median_ttft_ms": 41.0,
    "std_ttft_ms": 2.0, "mean_tpot_ms": 6.0, "median_tpot_ms": 6.1, "std_tpot_ms": 0.1, "accept_length": None,
    "server_info": {"model_path": "llama-3.1-8b", "tp_size": 1, "kv_cache_dtype": "auto", "version": "0.5.15"},
}  # fmt: skip
"""A server's row of SGLang."""

BATCH = {
    "run_name": "default", "batch_size": 1, "input_len": 1024, "output_len": 65, "prefill_latency": 0.05,
    "prefill_throughput": 20480.0, "median_decode_latency": 0.008, "median_decode_throughput": 125.0,
    "total_latency": 0.56, "overall_throughput": 1940.0,
}  # fmt: skip
"""A row of SGLang's bench_one_batch."""

BATCH_SERVER = {
    "run_name": "default", "batch_size": 1, "input_len": 1024, "output_len": 65, "latency": 0.57,
    "input_throughput": 17066.0, "output_throughput": 127.0, "overall_throughput": 1900.0, "last_ttft": 0.06,
    "last_gen_throughput": 125.0, "acc_length": -1, "cache_hit_rate": 0.0,
}  # fmt: skip
"""A row of SGLang's bench_one_batch_server."""

PERF = """ -- Bitrate: 6.00 bpw / 6.00 bpw (head)
 -- Chunk size: 2048

\x1b[33;1mPrefill:\x1b[0m
{prefill}
\x1b[33;1mGeneration\x1b[0m
{generation}
"""


def llama_row(*, n_prompt: int = 0, n_gen: int = 0, n_depth: int = 0, seconds: float, **other: Any) -> dict[str, Any]:
    """A test of llama-bench that took so long, three times alike."""
    ns = round(seconds * 1e9)
    told = {"n_prompt": n_prompt, "n_gen": n_gen, "n_depth": n_depth, "avg_ns": ns, "stddev_ns": 0, "avg_ts": 1.0,
            "stddev_ts": 0.0, "samples_ns": [ns] * 3, "samples_ts": [1.0] * 3}  # fmt: skip
    return LLAMA | told | other


def printed(prefill: dict[int, float], generation: dict[int, float]) -> str:
    """What exllamav3's eval/perf.py prints, of tokens a second by length and by context."""
    green, end = "\x1b[32;1m", "\x1b[0m"
    return PERF.format(
        prefill="\n".join(f"Length  {at: 6}: {green}{per_s:10.2f}{end} tokens/s" for at, per_s in prefill.items()),
        generation="\n".join(
            f"Context {at: 6}: {green}{per_s:10.2f}{end} tokens/s" for at, per_s in generation.items()
        ),
    )


def write(path: Path, content: Any) -> Path:
    """Rows as JSON lines where the name ends so, text as it is, else one JSON document."""
    if isinstance(content, str):
        text = content
    elif path.suffix == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in content)
    else:
        text = json.dumps(content, indent=1)
    path.write_text(text, encoding="utf-8")
    return path
