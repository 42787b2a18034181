"""The command line: parse, call one function, render. Heavy imports stay inside the commands that need them."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from twin.errors import (
    EXIT_BAD_INPUT,
    EXIT_CANNOT_WRITE,
    EXIT_DOES_NOT_FIT,
    EXIT_OUTSIDE_TOLERANCE,
    BadValue,
    TwinError,
)
from twin.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from twin.case import Question

EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141

EXIT_CODES = """\b
Exit codes:
  0    answered
  2    wrong input: an unknown name, a number out of range, a broken file
  3    answered: it does not fit
  4    answered: a validation case is outside its tolerance
  5    an output could not be written; an existing file is intact
  130  interrupted     141  the reader closed the pipe
"""


class _Parsed(click.ParamType[int]):
    """A parameter parsed by one of the unit parsers, whose message is shown as it is."""

    def __init__(self, name: str, parse: Callable[[str], int]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        del ctx
        if isinstance(value, int):
            return value
        try:
            return self.parse(value)
        except BadValue as wrong:
            option = f"{param.opts[0]}: " if param is not None else ""
            raise BadValue(f"{option}{wrong.message}", hint=wrong.hint) from None


class _Name(click.ParamType[str]):
    """A name that completes in the shell; what it stands for is checked where it is looked up."""

    def __init__(self, kind: str) -> None:
        self.name = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list["CompletionItem"]:
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


TOKENS = _Parsed("tokens", parse_tokens)
BYTES = _Parsed("size", parse_bytes)
OUTPUT = click.Path(dir_okay=False, path_type=Path)

Command = TypeVar("Command", bound=Callable[..., Any])

_QUESTION_OPTIONS = (
    click.option("--ctx", "ctx_tokens", type=TOKENS, default="1M", show_default=True,
                 help="Tokens of context: 32768, 256k, 1M (1M = 1,048,576)."),
    click.option("--model", type=_Name("model"), default="qwen3.8-flash-next", show_default=True,
                 help="A shipped model or the path of a model file."),
    click.option("--hw", type=_Name("machine"), default="3x-rtx3090", show_default=True,
                 help="A shipped machine or the path of a profile."),
    click.option("--engine", type=_Name("engine"), default="exllamav3", show_default=True,
                 help="The inference engine whose rules apply."),
    click.option("--kv-dtype", type=_Name("format"), default=None, help="Format of the cache [default: the engine's]."),
    click.option("--batch", type=int, default=1, show_default=True, help="Sequences that decode together."),
    click.option("--chunk", "chunk_tokens", type=TOKENS, default=None,
                 help="Prompt tokens of one prefill pass [default: the engine's]."),
    click.option("--ngram", type=click.Choice(["ram", "disk"]), default=None,
                 help="Where the n-gram table is read from [default: the engine's]."),
    click.option("--pcie", "lanes", type=click.Choice(["x16", "x8", "x4"]), default="x16", show_default=True,
                 help="What if: PCIe lanes of each device."),
)  # fmt: skip

_OFFLOAD_OPTIONS = (
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


def _options(*groups: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """All options of the groups, in order."""

    def decorate(command: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
_OUT = click.option("-o", "--output", type=OUTPUT, default=None, help="Write the answer to a file instead.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=EXIT_CODES)
@click.version_option(package_name="kv-twin", prog_name="twin")
def twin() -> None:
    """Tell where the KV cache should live, in how many bits, and what that costs.

    Predicts memory, speed and time to first token of LLM inference before anything is downloaded, from counted bytes
    and calibrated rates, each answer with a 90 % interval and the wall that it hits.

    \b
    Examples:
      twin predict --ctx 1M --layout offload     one question
      twin predict --ctx 200k --layout vram --explain
      twin compare --ctx 200k                    all layouts side by side
      twin validate --recorded                   predictions against published measurements
    """


@twin.command(epilog=EXIT_CODES)
@_options(_QUESTION_OPTIONS, _OFFLOAD_OPTIONS)
@click.option("--layout", type=_Name("layout"), default="offload", show_default=True, help="Where the cache lives.")
@click.option("--explain", is_flag=True, help="List every part, rate, byte and assumption behind the answer.")
@click.option("--trace", type=OUTPUT, default=None, help="Write the simulated step for Perfetto (ui.perfetto.dev).")
@click.option("--trace-phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True,
              help="What --trace shows: the decode step or the prefill's last chunk.")  # fmt: skip
@_JSON
@_OUT
def predict(
    *, explain: bool, trace: Path | None, trace_phase: str, as_json: bool, output: Path | None, **asked: Any
) -> int:
    """Predict whether it fits, how far the context goes, how fast it is and which wall it hits.

    \b
    Examples:
      twin predict --ctx 1M --layout offload
      twin predict --ctx 3M --ngram ram --explain
      twin predict --ctx 1M --staging 128MiB --copies overlapped
      twin predict --ctx 1M --pooled host        why pooled keys stay in VRAM
      twin predict --ctx 1M --pcie x4            the same machine on risers
      twin predict --ctx 1M --trace step.json    open in ui.perfetto.dev
      twin predict --hw my-machine.json --json
    """
    from twin.prediction import predict as answer  # noqa: PLC0415
    from twin.render import as_json as contracts  # noqa: PLC0415

    question = _question(asked)
    prediction = answer(question)
    if trace is not None:
        _write_trace(prediction, trace, trace_phase)
    if as_json:
        text = _dump(contracts.prediction_json(prediction))
    else:
        from twin.render import text as tables  # noqa: PLC0415

        text = tables.headline(prediction) + ("\n" + tables.explain(prediction) if explain else "")
    _deliver(text, output)
    return 0 if prediction.fits else EXIT_DOES_NOT_FIT


@twin.command(epilog=EXIT_CODES)
@_options(_QUESTION_OPTIONS)
@_JSON
@_OUT
def compare(*, as_json: bool, output: Path | None, **asked: Any) -> int:
    """Show all layouts of the engine side by side at one context.

    \b
    Examples:
      twin compare --ctx 200k
      twin compare --ctx 1M --json
    """
    from twin.engines import load_engine  # noqa: PLC0415
    from twin.prediction import predict as answer  # noqa: PLC0415
    from twin.render import as_json as contracts  # noqa: PLC0415
    from twin.render import text as tables  # noqa: PLC0415

    predictions = [answer(_question(asked | {"layout": name})) for name in load_engine(asked["engine"]).layouts]
    _deliver(_dump(contracts.comparison_json(predictions)) if as_json else tables.comparison(predictions), output)
    return 0 if any(each.fits for each in predictions) else EXIT_DOES_NOT_FIT


@twin.command(epilog=EXIT_CODES)
@click.option("--recorded", is_flag=True, help="Compare with published and recorded measurements (the default).")
@click.option("--hw", type=_Name("machine"), default="3x-rtx3090", show_default=True, help="Whose measurements.")
@_JSON
@_OUT
def validate(*, recorded: bool, hw: str, as_json: bool, output: Path | None) -> int:
    """Hold predictions against measurements, case by case; the rows that set a rate are shown apart.

    \b
    Examples:
      twin validate --recorded
      twin validate --recorded --json
    """
    from calibrate import recorded as records  # noqa: PLC0415
    from calibrate.report import validation_text  # noqa: PLC0415

    del recorded
    validation = records.validate_recorded(hw)
    _deliver(_dump(records.to_json(validation)) if as_json else validation_text(validation), output)
    return 0 if validation.within else EXIT_OUTSIDE_TOLERANCE


@twin.command()
@click.argument("name", type=_Name("machine"), required=False)
@_JSON
def profiles(*, name: str | None, as_json: bool) -> int:
    """List the machines, or every rate of one with its spread, source and date."""
    from twin.render import catalogue  # noqa: PLC0415

    _deliver(catalogue.profile_json(name) if as_json else catalogue.profile_text(name), None)
    return 0


@twin.command()
@click.argument("name", type=_Name("model"), required=False)
@_JSON
def models(*, name: str | None, as_json: bool) -> int:
    """List the models, or the shape of one."""
    from twin.render import catalogue  # noqa: PLC0415

    _deliver(catalogue.model_json(name) if as_json else catalogue.model_text(name), None)
    return 0


@twin.command()
@_JSON
def layouts(*, as_json: bool) -> int:
    """List the layouts and the engines that have them."""
    from twin.render import catalogue  # noqa: PLC0415

    _deliver(catalogue.layout_json() if as_json else catalogue.layout_text(), None)
    return 0


@twin.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(*, shell: str) -> int:
    """Print the script that teaches a shell to complete `twin`.

    \b
    Examples:
      twin completion bash > ~/.local/share/bash-completion/completions/twin
      twin completion zsh > ~/.zfunc/_twin
      twin completion fish > ~/.config/fish/completions/twin.fish
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415

    kind = get_completion_class(shell)
    if kind is not None:
        _deliver(kind(twin, {}, "twin", "_TWIN_COMPLETE").source(), None)
    return 0


def _question(asked: dict[str, Any]) -> "Question":
    from twin.case import Question  # noqa: PLC0415

    return Question(**asked | {"lanes": int(asked["lanes"].removeprefix("x"))})


def _write_trace(prediction: Any, path: Path, phase: str) -> None:
    from twin.errors import Impossible  # noqa: PLC0415
    from twin.render.output import write_atomic  # noqa: PLC0415
    from twin.render.trace import trace_json  # noqa: PLC0415
    from twin.roofline import Roofs  # noqa: PLC0415

    if not prediction.fits:
        raise Impossible(f"nothing to trace: {prediction.memory.shortage()}")
    write_atomic(path, trace_json(prediction.case, Roofs(prediction.machine), phase=phase))


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _deliver(text: str, output: Path | None) -> None:
    """To the file if one is named, otherwise to standard output, flushed so that a full disk is noticed here."""
    if output is not None:
        from twin.render.output import write_atomic  # noqa: PLC0415

        write_atomic(output, text)
        return
    sys.stdout.write(text)
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with a documented exit code; only a bug shows a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = twin.main(args=given, prog_name="twin", standalone_mode=False)
    except TwinError as refused:
        code = _refuse(given, type(refused).__name__, refused.message, refused.hint, refused.exit_code)
    except click.UsageError as wrong:
        code = _refuse(given, "UsageError", wrong.format_message(), "twin --help", EXIT_BAD_INPUT)
    except click.ClickException as wrong:
        code = _refuse(given, type(wrong).__name__, wrong.format_message(), "", EXIT_BAD_INPUT)
    except (KeyboardInterrupt, click.Abort):
        code = _refuse(given, "Interrupted", "interrupted", "", EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_CLOSED_PIPE
    except OSError as wrong:
        sys.stderr.write(f"twin: cannot write standard output: {wrong.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_CANNOT_WRITE
    sys.exit(code or 0)


def _refuse(given: Sequence[str], kind: str, message: str, hint: str, code: int) -> int:
    """One line on standard error, or the JSON error on standard output where JSON was asked for."""
    message, hint = " ".join(message.split()), " ".join(hint.split())
    if "--json" in given:
        from twin.render.as_json import error_json  # noqa: PLC0415

        sys.stdout.write(_dump(error_json(kind, message, hint)))
    else:
        sys.stderr.write(f"twin: {message}{f' ({hint})' if hint else ''}\n")
    return code


if __name__ == "__main__":
    main()
