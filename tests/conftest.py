"""Before any test imports a kernel: without a GPU, Triton kernels run in Triton's interpreter."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
