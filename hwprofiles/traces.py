"""Layouts of request traces that people have: a row says which columns or keys hold what. A new layout is a new row.

`twin.serving` reads by these rows, `recognition` names files by them. A name with dots is a path: keys, and places in
lists. Of several names for one thing a trace uses one. Under `prompt` and `output` a number counts tokens; text is
estimated.
"""

from typing import Literal

from msgspec import Struct


class TraceLayout(Struct, frozen=True, kw_only=True):
    """Where a layout says what."""

    name: str  # with its article
    marks: tuple[tuple[str, ...], ...]  # it is one where all names of one of these are there
    prompt: tuple[str, ...]
    output: tuple[str, ...]
    arrival: tuple[str, ...] = ()  # a trace without one of them says nothing of time
    id: tuple[str, ...] = ()
    time_unit: Literal["s", "ms"] | None = None  # of numbers; dates have none
    note: str = ""  # what a reader of the answer must know
    failed: str = ""  # what a request without output is; empty: a mistake
    only: tuple[tuple[str, int], ...] = ()  # what is modelled for one value alone, where it is there


JSON_LINES = TraceLayout(
    # github.com/kvcache-ai/Mooncake FAST25-release/traces (milliseconds), and
    # github.com/alibaba-edu/qwen-bailian-usagetraces-anon (seconds); this project's own names stand first
    name="a trace of JSON lines",
    marks=(("timestamp", "input_length"), ("arrival_s", "prompt_tokens")),
    arrival=("arrival_s", "timestamp"),
    prompt=("prompt_tokens", "input_length", "prompt"),
    output=("output_tokens", "output_length", "output"),
    id=("id", "request_id"),
)

TABLES = (
    TraceLayout(  # github.com/Azure/AzurePublicDataset AzureLLMInferenceDataset2023.md, 2024 and 2025 (with images)
        name="an Azure LLM inference trace (CSV)",
        marks=(("timestamp", "contexttokens", "generatedtokens"),),
        arrival=("timestamp",),
        prompt=("contexttokens",),
        output=("generatedtokens",),
        only=(("numimages", 0),),
    ),
    TraceLayout(  # github.com/HPMLL/BurstGPT README: seconds from midnight; `Response tokens` of failures are 0
        name="a BurstGPT trace (CSV)",
        marks=(("timestamp", "request tokens", "response tokens"),),
        arrival=("timestamp",),
        prompt=("request tokens",),
        output=("response tokens",),
        time_unit="s",
        failed="failed requests",
    ),
    TraceLayout(  # github.com/Mutinifni/splitwise-sim README: all times are in seconds
        name="a Splitwise trace (CSV)",
        marks=(("arrival_timestamp", "prompt_size", "token_size"),),
        arrival=("arrival_timestamp",),
        prompt=("prompt_size",),
        output=("token_size",),
        id=("request_id",),
        time_unit="s",
        only=(("batch_size", 1),),
    ),
    TraceLayout(  # github.com/microsoft/vidur data/processed_traces: in seconds from the first; some lack arrivals
        name="a Vidur trace (CSV)",
        marks=(("num_prefill_tokens", "num_decode_tokens"),),
        arrival=("arrived_at",),
        prompt=("num_prefill_tokens",),
        output=("num_decode_tokens",),
        time_unit="s",
    ),
    TraceLayout(  # the names of JSON lines
        name="a trace of requests (CSV)",
        marks=(("prompt_tokens", "output_tokens"), ("input_length", "output_length")),
        arrival=JSON_LINES.arrival,
        prompt=JSON_LINES.prompt[:2],
        output=JSON_LINES.output[:2],
        id=JSON_LINES.id,
    ),
)

PROMPTS = (
    TraceLayout(  # vllm/benchmarks/datasets.py of github.com/vllm-project/vllm takes the first two turns, too
        name="a list of ShareGPT conversations",
        marks=(("conversations",),),
        prompt=("conversations.0.value",),
        output=("conversations.1.value",),
        failed="conversations without question and reply",
    ),
    TraceLayout(  # examples/offline_inference/openai_batch there; what limits the output is taken for its length
        name="an OpenAI batch of requests",
        marks=(("custom_id", "body"),),
        prompt=("body.messages", "body.prompt"),
        output=("body.max_completion_tokens", "body.max_tokens"),
        id=("custom_id",),
        note="outputs as long as they may be",
        only=(("body.n", 1),),
    ),
    TraceLayout(  # `CustomDataset` of vllm/benchmarks/datasets.py
        name="a list of prompts without arrivals, as vLLM's custom data sets are",
        marks=(("prompt",),),
        prompt=("prompt",),
        output=("output_tokens",),
    ),
)
