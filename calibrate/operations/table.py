"""THE TABLE: every operation, once, and its cases. A cache format adds nothing here: formats come from the rulebook."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from calibrate.operations import dense, formats, sparse
from calibrate.operations.operation import MOST, Group, Operation
from hwprofiles.profile import HardwareProfile
from twin.operations.ops import Program

OPERATIONS: tuple[Operation, ...] = (
    dense.PRODUCT, sparse.DECODE_SELECT, sparse.DECODE_GATHER, sparse.PREFILL_SELECT, sparse.PREFILL_ATTENTION,
    sparse.DECODE_STEP, dense.LINEAR, dense.ELEMENTWISE, dense.APPEND, dense.SAMPLE, dense.PREFILL_DENSE,
    dense.DECODE_DENSE, dense.LAYER, formats.DECODE_FORMAT, formats.APPEND_FORMAT, formats.DEQUANTISE_FORMAT,
    formats.PREFILL_FORMAT, dense.DISK_ROWS, *dense.IMAGES,
)  # fmt: skip
"""In the order of fitting: what is combined in one call comes after its parts."""
BY_NAME = {operation.name: operation for operation in OPERATIONS}

GROUPS: tuple[Group, ...] = get_args(Group)


class Case(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """What is timed, and predicted beside it. ValueError for an unknown operation or a point that it cannot have."""

    operation: str
    at: dict[str, Annotated[int, Meta(ge=0, le=MOST)] | str]

    def __post_init__(self) -> None:
        if self.operation not in BY_NAME:
            raise ValueError(f"unknown operation {self.operation!r}: there are {', '.join(BY_NAME)}")
        self.row.check(self.at)

    @property
    def row(self) -> Operation:
        """Of the table."""
        return BY_NAME[self.operation]

    @cached_property
    def id(self) -> str:
        """Readable and unique."""
        return self.row.id(self.at)

    def program(self, dtype: str) -> Program:
        """The ops that it times. `dtype`: of the device's planes for sparse attention."""
        times = int(self.at["layers"]) if self.row.layered else 1
        return tuple(replace(block, times=block.times * times) for block in self.row.lower(self.at, dtype))

    def missing_rate(self, profile: HardwareProfile, dtype: str) -> str:
        """Empty, or which rates a profile lacks that it is predicted from: it may be older than their probes."""
        keys = [op.kernel for block in self.program(dtype) for op in block.ops if op.kernel]
        lacking = sorted({key for key in keys if key not in profile.kernels})
        return f"profile {profile.name} has no rate for {', '.join(lacking)}" if lacking else ""


def held_out_cases(group: Group, *, cuda: bool, quick: bool) -> Iterator[Case]:
    """The table's cases of a group, for a GPU or for a processor (smaller), quick or whole."""
    for operation in OPERATIONS:
        if group in operation.held_out:
            for point in operation.held_out[group].of(cuda=cuda, quick=quick):
                at = {name: value if isinstance(value, str) else int(value) for name, value in point.items()}
                yield Case(operation=operation.name, at=at)
