"""Every format is known by its own keys, and says the same points whichever version wrote it."""

from pathlib import Path
from typing import Any

import pytest

from calibrate.benchmarks.points import Given, Left, Point, Told
from calibrate.benchmarks.reading import read_benchmark
from tests.calibrate.benchmarks import files
from twin.errors import BadFile

NOTHING = Given()


def points(path: Path, given: Given = NOTHING) -> list[Point]:
    return [reading.point for reading in read_benchmark(path, given)[0]]


def told(path: Path, given: Given = NOTHING) -> Told:
    return read_benchmark(path, given)[0][0].told


ROWS = [
    files.llama_row(n_prompt=512, seconds=0.1),
    files.llama_row(n_gen=128, n_depth=4096, seconds=1.28),
    files.llama_row(n_prompt=512, n_gen=128, seconds=1.4),
]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_test_of_llama_bench_is_a_prompt_steps_or_both(tmp_path: Path, name: str) -> None:
    prompt, step, both = points(files.write(tmp_path / name, ROWS))
    assert (prompt.metric, prompt.prompt_tokens, prompt.kv_tokens, prompt.seconds) == (
        "prefill",
        512,
        0,
        pytest.approx(0.1),
    )
    assert (step.metric, step.steps, step.kv_tokens) == ("step", 128, 4096)
    assert step.seconds == pytest.approx(0.01)
    assert (both.metric, both.prompt_tokens, both.steps, both.seconds) == ("latency", 512, 128, pytest.approx(1.4))


def test_llama_bench_says_card_model_weights_cache_and_chunk(tmp_path: Path) -> None:
    row = files.llama_row(
        n_prompt=512,
        seconds=0.1,
        gpu_info="NVIDIA GeForce RTX 3090, NVIDIA GeForce RTX 3090",
        type_k="q8_0",
        type_v="q8_0",
    )
    said = told(files.write(tmp_path / "a.json", [row]))
    assert said.gpus == ("NVIDIA GeForce RTX 3090",) * 2
    assert (said.engine, said.weights, said.kv_dtype, said.chunk_tokens) == ("llama.cpp", "q4_k_m", "q8_0", 512)
    assert said.parameters == 8_030_261_312


@pytest.mark.parametrize(
    ("row", "cards"),
    [
        ({"split_mode": "none"}, 1),
        ({"split_mode": "layer"}, 3),
        ({"devices": "CUDA0/CUDA1"}, 2),
        ({"gpu_info": ""}, 0),
    ],
)
def test_only_devices_that_took_part_count(tmp_path: Path, row: dict[str, str], cards: int) -> None:
    three = {"gpu_info": ", ".join(["NVIDIA GeForce RTX 3090"] * 3)}
    made = files.llama_row(n_gen=8, seconds=1.0, **three | row)
    assert len(told(files.write(tmp_path / "a.json", [made])).gpus) == cards


@pytest.mark.parametrize(
    ("filename", "kind", "weights"),
    [
        ("x-Q4_K_M.gguf", "", "q4_k_m"),
        ("model.gguf", "qwen35 27B IQ4_XS - 4.25 bpw", "iq4_xs"),
        ("model.gguf", "llama 8B Q5_K - Small", "q5_k_s"),
        ("model.gguf", "llama 8B Q8_0", "q8_0"),
        ("model.gguf", "llama 8B F16", "f16"),
        ("model.gguf", "llama 8B all", ""),
    ],
)
def test_weights_are_named_as_the_command_line_takes_them(
    tmp_path: Path, filename: str, kind: str, weights: str
) -> None:
    row = files.llama_row(n_gen=8, seconds=1.0, model_filename=filename, model_type=kind)
    assert told(files.write(tmp_path / "a.json", [row])).weights == weights


def test_a_row_of_an_older_llama_bench_is_read_without_depth_and_devices(tmp_path: Path) -> None:
    newer = ("n_depth", "devices", "n_cpu_moe", "no_kv_offload", "flash_attn", "tensor_buft_overrides")
    row = {key: value for key, value in files.llama_row(n_gen=128, seconds=1.28).items() if key not in newer}
    (point,) = points(files.write(tmp_path / "a.json", [row | {"flash_attn": False, "mul_mat_q": True}]))
    assert (point.kv_tokens, point.steps) == (0, 128)


def test_flags_that_move_layers_or_the_cache_are_said(tmp_path: Path) -> None:
    row = files.llama_row(n_gen=8, seconds=1.0, n_gpu_layers=20, n_cpu_moe=4, no_kv_offload=True)
    assert dict(told(files.write(tmp_path / "a.json", [row])).flags) == {
        "gpu_layers": 20, "cpu_experts": 4, "layout": "nkvo"
    }  # fmt: skip


def test_one_request_at_a_time_is_a_first_token_and_a_step(tmp_path: Path) -> None:
    for row in (files.SERVE, files.SERVING):
        first, step = points(files.write(tmp_path / "a.jsonl", [row]))
        assert (first.metric, first.seconds, first.prompt_tokens) == ("ttft", pytest.approx(0.041), 1024)
        assert (step.metric, step.seconds, step.kv_tokens, step.steps) == ("step", pytest.approx(0.0061), 1024, 63)


def test_several_at_a_time_are_the_whole_run(tmp_path: Path) -> None:
    (point,) = points(files.write(tmp_path / "a.json", files.SERVE | {"max_concurrency": 4}))
    assert (point.metric, point.seconds, point.requests, point.batch) == ("served", 6.0, 8, 4)
    assert (point.prompt_tokens, point.steps) == (1024, 64)


def test_a_batch_of_sglang_is_one_pass_of_its_prompts_and_steps(tmp_path: Path) -> None:
    path = files.write(tmp_path / "a.jsonl", [files.BATCH | {"batch_size": 4}])
    prompt, step = points(path)
    assert (prompt.metric, prompt.seconds, prompt.batch) == ("prefill", 0.05, 4)
    assert (step.metric, step.seconds, step.kv_tokens, step.steps) == ("step", 0.008, 1024, 64)
    assert told(path).chunk_tokens == 1024


def test_a_batch_sent_to_a_server_is_a_first_token_and_steps(tmp_path: Path) -> None:
    first, step = points(files.write(tmp_path / "a.jsonl", [files.BATCH_SERVER]))
    assert (first.metric, first.seconds) == ("ttft", 0.06)
    assert step.seconds == pytest.approx((0.57 - 0.06) / 64)
    older = {key: files.BATCH_SERVER[key] for key in ("run_name", "batch_size", "input_len", "output_len", "latency")}
    (whole,) = points(
        files.write(tmp_path / "b.jsonl", [older | {"output_throughput": 1.0, "overall_throughput": 2.0}])
    )
    assert (whole.metric, whole.seconds, whole.steps) == ("latency", 0.57, 64)


def test_vllm_s_latency_and_throughput_take_their_lengths_from_options(tmp_path: Path) -> None:
    latency = files.write(
        tmp_path / "a.json", {"avg_latency": 1.0, "latencies": [0.9, 1.1], "percentiles": {"50": 1.0}}
    )
    (point,) = points(latency, Given(prompt_tokens=512, output_tokens=128, batch=8))
    assert (point.metric, point.steps, point.batch, point.n) == ("latency", 127, 8, 2)
    assert point.spread == pytest.approx(0.1 / 2**0.5)
    whole = {"elapsed_time": 9.0, "num_requests": 10, "total_num_tokens": 6400, "requests_per_second": 1.1}
    (served,) = points(files.write(tmp_path / "b.json", whole), Given(output_tokens=128))
    assert (served.metric, served.prompt_tokens, served.steps, served.seconds) == ("served", 512, 128, 9.0)
    for path in (latency, tmp_path / "b.json"):
        with pytest.raises(BadFile, match="does not say"):
            points(path)


def test_a_printout_of_exllamav3_is_read_through_colours_and_progress_bars(tmp_path: Path) -> None:
    text = files.printed({256: 500.0, 8192: 480.8}, {0: 17.2, 8192: 16.87})
    path = files.write(tmp_path / "a.txt", text.replace("Context", "Generate 3/4 \rContext"))
    short, long, empty, full = points(path)
    assert (long.metric, long.prompt_tokens) == ("prefill", 8192)
    assert long.seconds == pytest.approx(8192 / 480.8)
    assert (short.prompt_tokens, empty.kv_tokens, full.kv_tokens, full.metric) == (256, 0, 8192, "step")
    assert (told(path).weights, told(path).chunk_tokens) == ("6.00bpw", 2048)


@pytest.mark.parametrize(
    ("row", "because"),
    [
        (files.SERVE | {"spec_decode_acceptance_length": 2.5}, "speculation"),
        (files.SERVE | {"failed": 3}, "failed"),
        (files.SERVE | {"request_rate": 4.0, "max_concurrency": None}, "4.0 a second"),
        (files.SERVING | {"accept_length": 2.5}, "speculation"),
        (files.BATCH_SERVER | {"cache_hit_rate": 0.5}, "prefix cache"),
        (files.BATCH_SERVER | {"acc_length": 2.0}, "speculation"),
        (files.llama_row(n_gen=8, seconds=1.0, split_mode="none", main_gpu=1), "device 1"),
        (files.llama_row(n_gen=8, seconds=1.0, tensor_split="3.00/1.00"), "uneven"),
    ],
)
def test_what_is_no_evidence_is_left_out_with_its_reason(tmp_path: Path, row: dict[str, Any], because: str) -> None:
    good = files.llama_row(n_gen=128, seconds=1.28)
    found, left = read_benchmark(files.write(tmp_path / "a.jsonl", [good, row]), NOTHING)
    assert len(found) == 1
    assert [Left] == [type(each) for each in left]
    assert because in left[0].reason
    with pytest.raises(BadFile, match=because):
        read_benchmark(files.write(tmp_path / "b.jsonl", [row]), NOTHING)


@pytest.mark.parametrize("seconds", ["0", "-5", "NaN", "Infinity", "1e300", '"12"', "null", "true"])
def test_a_time_that_is_none_is_refused_by_its_key(tmp_path: Path, seconds: str) -> None:
    for key, row in (("avg_ns", ROWS[0]), ("prefill_latency", files.BATCH), ("mean_ttft_ms", files.SERVE)):
        if key == "mean_ttft_ms" and seconds == "null":
            continue  # vLLM leaves out what was not asked for
        text = files.json.dumps(row | {key: "HERE"}).replace('"HERE"', seconds)
        with pytest.raises(BadFile, match=key):
            points(files.write(tmp_path / "a.json", text))


def test_a_file_cut_anywhere_is_refused_or_has_fewer_whole_lines(tmp_path: Path) -> None:
    whole = "".join(files.json.dumps(row) + "\n" for row in ROWS)
    for end in range(1, len(whole), 37):
        path = files.write(tmp_path / "a.jsonl", whole[:end])
        lines = whole[:end].splitlines()
        if whole[:end].endswith(("\n", "}")):
            assert len(points(path)) == len(lines)
        else:
            with pytest.raises(BadFile, match="cut short"):
                points(path)


@pytest.mark.parametrize(
    "content",
    ["", "hello", "[]", "{}", "[1]", "[" * 100_000, '{"a": 1}\n{"a": 1}', "Context 5: nothing tokens/s", "5 tokens/s",
     "Length 256:  100.0 tokens/s\nContext  256:   5", "Context 256: 0.0 tokens/s", '{"a": 1, "a": 2}'],
)  # fmt: skip
def test_what_is_no_benchmark_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadFile):
        points(files.write(tmp_path / "a.txt", content))


def test_another_file_is_called_what_it_is(tmp_path: Path) -> None:
    for content, kind in ((b"GGUF\x03\x00\x00\x00\xff", "a GGUF model"), (b'{"schema": "twin.hardware/1"}', "profile")):
        path = tmp_path / "a.json"
        path.write_bytes(content)
        with pytest.raises(BadFile, match=kind):
            points(path)
