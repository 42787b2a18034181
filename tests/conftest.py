"""Before any test imports a kernel: without a GPU, Triton kernels run in Triton's interpreter."""

import gc
import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """What is imported and collected stays until the end: no later collection of garbage has to walk over it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end all of it may go."""
    gc.unfreeze()
