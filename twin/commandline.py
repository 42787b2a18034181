"""What the commands share: parameter types, the options of a question, a progress bar."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from twin.errors import BadValue
from twin.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from twin.case import Question


class Parsed(click.ParamType[int]):
    """A parameter parsed by one of the unit parsers, whose message is shown as it is."""

    def __init__(self, name: str, parse: Callable[[str], int]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; BadValue, naming the option, where the parser refuses the text."""
        del ctx
        if isinstance(value, int):
            return value
        try:
            return self.parse(value)
        except BadValue as wrong:
            option = f"{param.opts[0]}: " if param is not None else ""
            raise BadValue(f"{option}{wrong.message}", hint=wrong.hint) from None


class Name(click.ParamType[str]):
    """A name that completes in the shell; what it stands for is checked where it is looked up."""

    def __init__(self, kind: str) -> None:
        self.name = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list["CompletionItem"]:
        """Known names that begin with what is typed."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415

        del ctx, param
        return [CompletionItem(name) for name in _names(self.name) if name.startswith(incomplete)]


def _names(kind: str) -> list[str]:
    from hwprofiles import profile_names  # noqa: PLC0415
    from twin.engines import engine_names  # noqa: PLC0415
    from twin.formats import format_names  # noqa: PLC0415
    from twin.layouts import layout_names  # noqa: PLC0415
    from twin.models import model_names  # noqa: PLC0415

    listed = {
        "model": model_names,
        "machine": profile_names,
        "engine": engine_names,
        "layout": layout_names,
        "format": format_names,
    }
    return listed[kind]()


TOKENS = Parsed("tokens", parse_tokens)
BYTES = Parsed("size", parse_bytes)
OUTPUT = click.Path(dir_okay=False, readable=False, path_type=Path)

Command = TypeVar("Command", bound=Callable[..., Any])

QUESTION_OPTIONS = (
    click.option("--ctx", "ctx_tokens", type=TOKENS, default="1M", show_default=True,
                 help="Tokens of context: 32768, 256k, 1M (1M = 1,048,576)."),
    click.option("--model", type=Name("model"), default="qwen3.8-flash-next", show_default=True,
                 help="A shipped model or the path of a model file."),
    click.option("--hw", type=Name("machine"), default="3x-rtx3090", show_default=True,
                 help="A shipped machine or the path of a profile."),
    click.option("--engine", type=Name("engine"), default="exllamav3", show_default=True,
                 help="The inference engine whose rules apply."),
    click.option("--kv-dtype", type=Name("format"), default=None, help="Format of the cache [default: the engine's]."),
    click.option("--batch", type=int, default=1, show_default=True, help="Sequences that decode together."),
    click.option("--chunk", "chunk_tokens", type=TOKENS, default=None,
                 help="Prompt tokens of one prefill pass [default: the engine's]."),
    click.option("--ngram", type=click.Choice(["ram", "disk"]), default=None,
                 help="Where the n-gram table is read from [default: the engine's]."),
    click.option("--pcie", "lanes", type=click.Choice(["x16", "x8", "x4"]), default="x16", show_default=True,
                 help="What if: PCIe lanes of each device."),
)  # fmt: skip

OFFLOAD_OPTIONS = (
    click.option("--staging", "staging_bytes", type=BYTES, default=None,
                 help="Buffer of a staged prefill, such as 32MiB [default: the engine's]."),
    click.option("--prefill", type=click.Choice(["auto", "staged", "naive"]), default=None,
                 help="Staged through a buffer, or every token gathering for itself [default: the engine's rule]."),
    click.option("--copies", type=click.Choice(["serial", "overlapped"]), default=None,
                 help="Staged copies before the kernels, or beside them [default: the engine's]."),
    click.option("--pooled", type=click.Choice(["vram", "host"]), default=None,
                 help="What if: the indexer's pooled keys on the host [default: vram]."),
    click.option("--host-pages", type=click.Choice(["huge", "4KiB"]), default=None,
                 help="Page size of registered host memory [default: huge]."),
)  # fmt: skip


def options(*groups: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """All options of the groups, in order."""

    def decorate(command: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
OUT = click.option("-o", "--output", type=OUTPUT, default=None, help="Write the answer to a file instead.")


def question(asked: dict[str, Any]) -> "Question":
    """The question that the options' values ask."""
    from twin.case import Question  # noqa: PLC0415

    return Question(**asked | {"lanes": int(asked["lanes"].removeprefix("x"))})


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar with the time left on standard error: update(done, total, what)."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title)
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, description=f"{title} {what}"
        )
