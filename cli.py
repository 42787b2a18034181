"""The command line: parse, call one function, render. Heavy imports stay inside the commands that need them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import click

    from twin.commandline import JSON, OFFLOAD_OPTIONS, OUT, OUTPUT, QUESTION_OPTIONS, Name, options, progress_bar
    from twin.commandline import question as question_of
    from twin.delivery import EXIT_CODES, deliver, dump, end
    from twin.errors import EXIT_DOES_NOT_FIT, EXIT_OUTSIDE_TOLERANCE
except KeyboardInterrupt:  # before `main` is there to catch it
    sys.stderr.write("twin: interrupted\n")
    sys.exit(130)

if TYPE_CHECKING:
    from twin.prediction import Prediction


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EXIT_CODES,
    invoke_without_command=True,
)
@click.version_option(package_name="kv-twin", prog_name="twin")
@click.pass_context
def twin(context: click.Context) -> None:
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
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@twin.command(epilog=EXIT_CODES)
@options(QUESTION_OPTIONS, OFFLOAD_OPTIONS)
@click.option("--layout", type=Name("layout"), default="offload", show_default=True, help="Where the cache lives.")
@click.option("--explain", is_flag=True, help="List every part, rate, byte and assumption behind the answer.")
@click.option("--trace", type=OUTPUT, default=None, help="Write the simulated step for Perfetto (ui.perfetto.dev).")
@click.option("--trace-phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True,
              help="What --trace shows: the decode step or the prefill's last chunk.")  # fmt: skip
@JSON
@OUT
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

    prediction = answer(question_of(asked))
    if trace is not None:
        _write_trace(prediction, trace, trace_phase)
    if as_json:
        text = dump(contracts.prediction_json(prediction))
    else:
        from twin.render import text as tables  # noqa: PLC0415

        text = tables.headline(prediction) + ("\n" + tables.explain(prediction) if explain else "")
    deliver(text, output)
    return 0 if prediction.fits else EXIT_DOES_NOT_FIT


@twin.command(epilog=EXIT_CODES)
@options(QUESTION_OPTIONS)
@JSON
@OUT
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

    predictions = [answer(question_of(asked | {"layout": name})) for name in load_engine(asked["engine"]).layouts]
    deliver(dump(contracts.comparison_json(predictions)) if as_json else tables.comparison(predictions), output)
    return 0 if any(each.fits for each in predictions) else EXIT_DOES_NOT_FIT


@twin.command(epilog=EXIT_CODES)
@click.option("--recorded", is_flag=True, help="Against everything that was ever recorded (the default).")
@click.option(
    "--hw",
    type=Name("machine"),
    default=None,
    help="Whose measurements [default: all that are recorded]; with --device, the profile to judge.",
)
@click.option("--device", default=None, help="Run the kernels here and now: cuda, cuda:1 or cpu.")
@click.option("--quick", is_flag=True, help="With --device: a third of the grid.")
@click.option("--curve", is_flag=True, help="With --device: the long decode curve too, up to 3M tokens.")
@click.option("--record", "keep", is_flag=True, help="With --device: add the rows to the profile's measurements.")
@JSON
@OUT
def validate(
    *,
    recorded: bool,
    hw: str | None,
    device: str | None,
    quick: bool,
    curve: bool,
    keep: bool,
    as_json: bool,
    output: Path | None,
) -> int:
    """Hold predictions against measurements, case by case; the rows that set a rate are shown apart.

    \b
    Examples:
      twin validate --recorded
      twin validate --recorded --hw 3x-rtx3090 --json
      twin validate --hw my-machine.json --device cuda --record
      twin validate --hw my-machine.json --device cpu --quick
    """
    from calibrate.report import validation_text  # noqa: PLC0415
    from calibrate.validation import to_json  # noqa: PLC0415

    if device is None:
        if quick or curve or keep:
            raise click.UsageError("--quick, --curve and --record go with --device")
        from calibrate.records import validate_records  # noqa: PLC0415

        validation = validate_records(hw)
    else:
        if hw is None or recorded:
            raise click.UsageError("--device needs --hw, the profile to judge, and goes without --recorded")
        from calibrate.live_run import record, validate_live  # noqa: PLC0415

        with progress_bar("validating") as progress:
            validation, measurements = validate_live(hw, device, quick=quick, curve=curve, progress=progress)
        for row in measurements.left_out:
            click.echo(f"left out: {row.case.id}: {row.reason}", err=True)
        if keep:
            click.echo(f"recorded in {record(measurements, hw)}", err=True)
    deliver(dump(to_json(validation)) if as_json else validation_text(validation), output)
    return 0 if validation.within else EXIT_OUTSIDE_TOLERANCE


@twin.command(epilog=EXIT_CODES)
@click.option("--device", default="cuda:0", show_default=True, help="What to measure: cuda:0, cuda:1 or cpu.")
@click.option("--quick", is_flag=True, help="Under two minutes instead of under eight; wider intervals.")
@click.option("--name", default=None, help="What the profile calls the machine [default: the file's name].")
@click.option("-o", "--output", type=OUTPUT, required=True, help="The profile to write, such as my-machine.json.")
def calibrate(*, device: str, quick: bool, name: str | None, output: Path) -> int:
    """Measure this machine and write its profile; an interrupted run is continued by the same command.

    \b
    Examples:
      twin calibrate -o my-machine.json
      twin calibrate --device cpu --quick -o my-cpu.json
      twin predict --hw ./my-machine.json --engine twin
    """
    from calibrate.session import run_calibration  # noqa: PLC0415

    with progress_bar("calibrating") as progress:
        outcome = run_calibration(
            device=device,
            quick=quick,
            output=output,
            name=name,
            progress=lambda probe, done_s, total_s: progress(int(done_s), max(1, int(total_s)), probe),
        )
    for caution in outcome.cautions:
        click.echo(f"warning: {caution}", err=True)
    for probe, reason in outcome.skipped.items():
        click.echo(f"skipped: {probe}: {reason}", err=True)
    click.echo(f"{outcome.profile_path} written in {outcome.seconds:.0f} s; records in {outcome.record_path}")
    return 0


@twin.command()
@click.argument("name", type=Name("machine"), required=False)
@JSON
def profiles(*, name: str | None, as_json: bool) -> int:
    """List the machines, or every rate of one with its spread, source and date."""
    from twin.render import catalogue  # noqa: PLC0415

    deliver(catalogue.profile_json(name) if as_json else catalogue.profile_text(name), None)
    return 0


@twin.command()
@click.argument("name", type=Name("model"), required=False)
@JSON
def models(*, name: str | None, as_json: bool) -> int:
    """List the models, or the shape of one."""
    from twin.render import catalogue  # noqa: PLC0415

    deliver(catalogue.model_json(name) if as_json else catalogue.model_text(name), None)
    return 0


@twin.command()
@JSON
def layouts(*, as_json: bool) -> int:
    """List the layouts and the engines that have them."""
    from twin.render import catalogue  # noqa: PLC0415

    deliver(catalogue.layout_json() if as_json else catalogue.layout_text(), None)
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
        deliver(kind(twin, {}, "twin", "_TWIN_COMPLETE").source(), None)
    return 0


def _write_trace(prediction: "Prediction", path: Path, phase: str) -> None:
    from twin.render.output import write_atomic  # noqa: PLC0415
    from twin.render.trace import trace_json  # noqa: PLC0415
    from twin.roofline import Roofs  # noqa: PLC0415

    if not prediction.fits:
        click.echo(f"nothing was traced: it does not fit; {path} is as it was", err=True)
        return
    write_atomic(path, trace_json(prediction.case, Roofs(prediction.machine), phase=phase))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with a documented exit code; only a bug shows a traceback."""
    sys.exit(end(twin, sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
