"""llama.cpp as vendored in llama-cpp-python 0.3.36, and Ollama 0.33 around it: GGUF weights, one cell a token.

Sources, of github.com/ggml-org/llama.cpp: `src/llama-context.cpp` (padding, streams, copies of inputs, reserved
buffers), `src/llama-kv-cache.cpp` and `src/llama-kv-cache-iswa.cpp` (cells, windows, latent caches),
`src/llama-memory-recurrent.cpp` and `src/llama-model.cpp` (states in fp32, copies of them for drafts, split of layers),
`src/llama-graph.cpp` (type of the mask), `ggml/src/ggml-backend.cpp` (four copies), `ggml/src/ggml-cuda/fattn.cu` (what
flash attention dequantises, and where), `ggml/src/ggml-cuda/ggml-cuda.cu` (from 32 tokens on a device multiplies with
weights of the host), `common/common.h`, `common/arg.cpp` and `tools/server/server.cpp` (defaults, types of cache). Of
github.com/ollama/ollama v0.33.0-rc2: `envconfig/config.go` (one slot), `llm/llama_server.go` and `api/types.go` (512
tokens a batch, fp16 caches, flash attention where the card has it: as llama.cpp by itself).
"""

from msgspec.structs import replace

from twin.engines.rules import BackendRules, CellRules, EngineRules, stated
from twin.formats import GGML
from twin.models.ggml import QUANTISED
from twin.units import MIB

PLAIN = ("fp16", "bf16", "fp32")
TYPES = (*QUANTISED, "q1_0", "q2_0", "tq1_0", "tq2_0")
UNFUSED = "llama.cpp_unfused"
"""Attention without flash attention (`-fa off`), which takes no quantised V."""

CELLS = CellRules(
    slots=4,
    input_copies=4,
    plain="fp16",
    draft_format="fp16",
    fuses=("llama.cpp",),
    offloads_from=32,
    cpu="llama.cpp_cpu",
)

RULES = EngineRules(
    name="llama.cpp",
    summary="llama.cpp of 2026-11: the whole context laid out at the start, layers split over devices in order",
    page_tokens=256,
    layouts=("vram", "nkvo"),
    formats=(*PLAIN, *GGML),
    host_formats=(*PLAIN, *GGML),
    weight_formats=(*TYPES, "f16", "f32", "mxfp4", "nvfp4", "bf16", "fp32"),
    usual_for=(*TYPES, "f16", "f32"),
    machine="rtx3090",
    chunk_tokens=512,
    unprefilled_tokens=0,
    hop_element_bytes=4,
    ngram="ram",
    embedding_on_host=True,
    state_element_bytes=4,
    workspace=stated(
        390 * MIB,
        0.4,
        "unaccounted, median of four cards: RTX 3090 264 and 279 MiB (ollama/ollama#17482), 5090 325, 4090 451 to 456 "
        "(ggml-org/llama.cpp#15860), PRO 6000 749 (#27953)",
    ),
    compute_dtype="fp16",
    family_operands={"quantised": "int8"},  # `ggml/src/ggml-cuda/mmq.cu`: what meets them is quantised to q8_1
    weight_families=dict.fromkeys((*TYPES, "mxfp4", "nvfp4"), "quantised")
    | dict.fromkeys(("f16", "f32", "bf16", "fp32"), "f16"),
    backends=BackendRules(
        by_format=dict.fromkeys(PLAIN, ("llama.cpp", UNFUSED)) | dict.fromkeys(GGML, ("llama.cpp",)),
    ),
    cells=CELLS,
)

OLLAMA = replace(
    RULES,
    name="ollama",
    kernels_of="llama.cpp",
    summary="Ollama 0.33: llama.cpp with one slot",
    cells=replace(CELLS, slots=1),
)
