"""Kernels run through Triton's interpreter on CPU tensors; without torch or triton the whole folder is skipped."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels are bound to it when they are defined

MISSING = [name for name in ("torch", "triton") if find_spec(name) is None]


class _Skipped(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"needs {' and '.join(MISSING)}: pip install 'kv-twin[kernels]'")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """A test file that cannot be imported is reported as skipped, with the reason."""
    return _Skipped.from_parent(parent, path=module_path) if MISSING else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton 3.6 does with older numpy what numpy warned of before it stopped taking it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors on a busy machine: a second thread costs more than it gives."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _patched_once() -> Iterator[None]:
    """Without it, every test of a kernel takes half as long again."""
    from tests.realkernels.interpreted import patch_once_a_launch

    with pytest.MonkeyPatch.context() as patches:
        patch_once_a_launch(patches)
        yield


@pytest.fixture(autouse=True, scope="session")
def _interpreted() -> None:
    """Kernels that some other folder's tests have imported before would want a GPU here."""
    from triton.runtime.interpreter import InterpretedFunction

    from realkernels.kernels import gather

    if not isinstance(gather._combine_splits, InterpretedFunction):
        pytest.skip("the kernels were imported before TRITON_INTERPRET was set: run this folder on its own")
    if not _loops_run():
        import numpy as np
        import triton

        pytest.skip(
            f"the interpreter of triton {triton.__version__} cannot loop with numpy {np.__version__}: take < 2.4"
        )


def _loops_run() -> bool:
    """Triton 3.6 makes range bounds of arrays of one element, which numpy 2.4 no longer takes."""
    import torch
    from triton.runtime.errors import InterpreterError

    from realkernels.kernels.select import Selection
    from realkernels.shape import QsaShape

    shape, zeros = QsaShape(budget=4, index_heads=1, index_dim=16), torch.zeros(1, 16).half()
    try:
        Selection(shape, most_blocks=1, device=zeros.device).run(zeros, zeros, torch.zeros(1, dtype=torch.int32))
    except InterpreterError:
        return False
    return True
