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

    from twin.ask.question import Question


class Parsed(click.ParamType[int]):
    """A parameter parsed by one of the unit parsers, whose message is shown as it is."""

    def __init__(self, name: str, parse: Callable[[str], int], *, hint: str = "") -> None:
        self.name = name
        self.parse = parse
        self.hint = hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; BadValue, naming the option, where the parser refuses the text."""
        del ctx
        if isinstance(value, int):
            return value
        try:
            return self.parse(value)
        except BadValue as wrong:
            option = f"{param.opts[0]}: " if param is not None else ""
            raise BadValue(f"{option}{wrong.message}", hint=self.hint or wrong.hint) from None


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
    from twin.engines import backend_names, engine_names  # noqa: PLC0415
    from twin.formats import format_names  # noqa: PLC0415
    from twin.layouts import layout_names  # noqa: PLC0415
    from twin.models import model_names  # noqa: PLC0415

    listed = {
        "model": model_names,
        "machine": profile_names,
        "engine": engine_names,
        "layout": layout_names,
        "format": format_names,
        "backend": backend_names,
    }
    return listed[kind]()


class Stream(click.Path):
    """A path; `-` stands for a standard stream."""

    def __init__(self, stream: str, **checks: Any) -> None:
        super().__init__(path_type=Path, **checks)
        self.stream = stream

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path that is meant."""
        return super().convert(self.stream if str(value) == "-" else value, param, ctx)


TOKENS = Parsed("tokens", parse_tokens)
OUTPUT_TOKENS = Parsed("tokens", parse_tokens, hint="--output is a length here; -o FILE writes the answer to a file")
BYTES = Parsed("size", parse_bytes)
INPUT = Stream("/dev/stdin")
OUTPUT = Stream("/dev/stdout", dir_okay=False, readable=False)
FILE = click.Path(dir_okay=False, readable=False, path_type=Path)

Command = TypeVar("Command", bound=Callable[..., Any])


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
    from twin.ask.question import Question  # noqa: PLC0415

    lanes = int(asked["lanes"].removeprefix("x"))
    return Question(**asked | {"lanes": lanes, "cached_tokens": asked.get("cached_tokens") or 0})


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar with the time left on standard error: update(done, total, what). Nothing where nobody looks."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:  # an empty line would be all that is left
        yield lambda *_: None
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title)
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, description=f"{title} {what}"
        )
