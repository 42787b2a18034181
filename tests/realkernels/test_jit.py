"""A computer without Triton quantises, dequantises and attends by the codecs' references."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
sys.modules["triton"] = None
import torch
from realkernels.codecs import codec_names
from realkernels.shape import AttentionShape
from realkernels.timed.append import Append
from realkernels.timed.prefill import AttendChunk
shape, device = AttentionShape(query_heads=2, kv_heads=1, head_dim=128), torch.device("cpu")
for name in codec_names():
    if not name.startswith("exl3") or name == "exl3_k3v5":
        assert Append(name, shape=shape, tokens=3, layers=1, device=device).verify() < 1, name
assert AttendChunk("q8_0", shape=shape, q_tokens=3, ctx_tokens=40, caches=1, device=device).verify() < 1e-5
"""


def test_codecs_and_their_timed_calls_need_no_triton() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert ran.returncode == 0, ran.stderr
