"""The command line: parse, call one function, render. Heavy imports stay inside the commands that need them."""

import sys

try:
    from twin.cli import stopping

    _before = stopping.handle_with(stopping.leave)  # while the rest loads

    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    import click

    from twin.cli import options as ask
    from twin.cli.delivery import EXIT_CODES, deliver, dump, end
    from twin.cli.options import FILE, JSON, OUT, OUTPUT, Name, with_options
    from twin.cli.outputs import check_outputs, progress_bar
    from twin.errors import EXIT_DOES_NOT_FIT, EXIT_OUTSIDE_TOLERANCE
except KeyboardInterrupt:  # in its first lines
    sys.stderr.write("twin: interrupted\n")
    sys.exit(130)


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
      twin simulate --requests 500 --rate 0.5    many requests: throughput, time to first token
      twin formats                               what the names of cache formats stand for
      twin formats --hw h200                     from where on each is faster than bf16
      twin validate --recorded                   predictions against published measurements
      twin quality                               what each cache format does to attention
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@twin.command(epilog=EXIT_CODES)
@with_options(
    ask.QUESTION_OPTIONS, (ask.LAYOUT,), ask.OFFLOAD_OPTIONS, ask.POOL_OPTIONS, (ask.MAX_LEN, ask.CACHED, ask.CACHED_IN)
)
@with_options(ask.CELL_OPTIONS)
@with_options(ask.SPECULATION_OPTIONS)
@click.option("--explain", is_flag=True, help="List every part, rate, byte and assumption behind the answer.")
@click.option("--trace", type=OUTPUT, help="Write the simulated step for Perfetto (ui.perfetto.dev).")
@click.option("--trace-phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True,
              help="What --trace shows: the decode step or the prefill's last chunk.")  # fmt: skip
@JSON
@OUT
def predict(
    *, explain: bool, trace: Path | None, trace_phase: str, as_json: bool, output: Path | None, **asked: Any
) -> int:
    """Predict fit, longest context, speed and wall, with intervals.

    \b
    Examples:
      twin predict --ctx 1M --layout offload
      twin predict --ctx 3M --ngram ram --explain
      twin predict --ctx 1M --staging 128MiB --copies overlapped
      twin predict --ctx 1M --pooled host        why pooled keys stay in VRAM
      twin predict --ctx 1M --pcie x4            the same machine on risers
      twin predict --ctx 1M --trace step.json    open in ui.perfetto.dev
      twin predict --model qwen3.8-27b --ctx 100k --kv-dtype fp8
      twin predict --model qwen3.8-27b-fast --ctx 100k --kv-dtype fp8 --spec mtp:3 --task summarize
      twin predict --model ./config.json --ctx 32k --weights awq
      twin predict --hw my-machine.json --json
    """
    from twin.ask.question import Question  # noqa: PLC0415
    from twin.prediction import predict as answer  # noqa: PLC0415
    from twin.render import as_json as contracts  # noqa: PLC0415

    check_outputs(output, beside={"--trace": trace})
    prediction = answer(Question(**asked))
    if trace is not None:
        from twin.render.trace import write_trace  # noqa: PLC0415

        if not write_trace(prediction, trace, phase=trace_phase):
            click.echo(f"nothing was traced: it does not fit; {trace} is as it was", err=True)
    if as_json:
        text = dump(contracts.prediction_json(prediction))
    else:
        from twin.render import text as tables  # noqa: PLC0415

        text = tables.headline(prediction) + ("\n" + tables.explain(prediction) if explain else "")
    deliver(text, output)
    return 0 if prediction.fits else EXIT_DOES_NOT_FIT


@twin.command(epilog=EXIT_CODES)
@with_options(ask.QUESTION_OPTIONS, (ask.LAYOUT,), ask.POOL_OPTIONS, (ask.MAX_LEN,), ask.SPECULATION_OPTIONS)
@with_options(ask.CELL_OPTIONS)
@click.option("--over", type=click.Choice(["layouts", "formats"]),
              help="What to set side by side [default: formats under one layout, else layouts].")  # fmt: skip
@click.option("--formats", metavar="A,B,...", help="Which formats [default: those that the engine keeps].")
@JSON
@OUT
def compare(*, over: str | None, formats: str | None, as_json: bool, output: Path | None, **asked: Any) -> int:
    """Set layouts or cache formats side by side at one context. Fit, pool, speed, and published quality.

    \b
    Examples:
      twin compare --ctx 200k
      twin compare --model qwen3.8-27b --ctx 100k
      twin compare --model qwen3.8-27b --ctx 100k --formats bf16,fp8,kvarn_k4v2_g128
      twin compare --ctx 1M --over formats --what-if --formats fp16,int4_per_token_head
    """
    from twin.answers.comparison import compare_all  # noqa: PLC0415
    from twin.ask.question import Question  # noqa: PLC0415
    from twin.render import as_json as contracts  # noqa: PLC0415
    from twin.render import comparison as tables  # noqa: PLC0415

    check_outputs(output)
    compared = compare_all(Question(**asked), over=over, formats=None if formats is None else formats.split(","))
    deliver(dump(contracts.comparison_json(compared)) if as_json else tables.comparison_text(compared), output)
    return 0 if any(each.fits for each in compared.predictions) else EXIT_DOES_NOT_FIT


@twin.command(epilog=EXIT_CODES)
@with_options(ask.SERVED_MODEL_OPTIONS, ask.WORKLOAD_OPTIONS, ask.TRACE_OPTIONS)
@with_options((ask.SERVED_MAX_LEN,), ask.POOL_OPTIONS, ask.SPECULATION_OPTIONS)
@click.option("--trace", type=OUTPUT, help="Write residents, steps and requests for Perfetto.")
@click.option("--requests-out", type=OUTPUT, help="Write a JSON line for every finished request.")
@click.option("--no-interval", is_flag=True, help="One run instead of three: no 90 % intervals.")
@JSON
@click.option("-o", "--out", "output", type=OUTPUT, help="Write the answer to a file instead.")
def simulate(*, as_json: bool, output: Path | None, **asked: Any) -> int:
    """Serve many requests and time them. Continuous batching, chunked prefill, one pool of blocks.

    \b
    Examples:
      twin simulate --model llama-3.1-8b --hw h200 --requests 1000 --rate 10 --prompt 512 --output 256
      twin simulate --model qwen3.8-27b --kv-dtype fp8 --requests 4 --prompt 60000 --output 1024 --lengths fixed
      twin simulate --model llama-3.1-8b --hw h200 --trace-in trace.jsonl --requests-out done.jsonl
    """
    from twin.cli.workloads import serve_asked  # noqa: PLC0415
    from twin.render.serving import service_json, service_text  # noqa: PLC0415

    written = {"--trace": asked["trace"], "--requests-out": asked["requests_out"]}
    check_outputs(output, beside=written, read={"--trace-in": asked["trace_in"]})
    service, source = serve_asked(asked)
    told = service, source.text, source.reading
    deliver(dump(service_json(*told)) if as_json else service_text(*told), output)
    return 0 if service.result.completed else EXIT_DOES_NOT_FIT


@twin.command(epilog=EXIT_CODES)
@with_options(ask.MEASURED_OPTIONS, ask.BENCHMARK_OPTIONS)
@JSON
@OUT
def validate(
    *, recorded: bool, public: bool, hw: str | None, device: str | None, quick: bool, groups: tuple[str, ...],
    keep: bool, as_json: bool, output: Path | None, **benchmarks: Any,
) -> int:  # fmt: skip
    """Hold predictions against measurements, case by case. The rows that set a rate are shown apart.

    \b
    Examples:
      twin validate --recorded
      twin validate --recorded --hw 3x-rtx3090 --json
      twin validate --recorded --public          what strangers published of other machines and engines
      twin validate --hw my-machine.json --device cuda --record
      twin validate --hw my-machine.json --device cuda --group formats --group operations --record
      twin validate --hw my-machine.json --device cpu --quick
      twin validate --hw my-machine.json         what was recorded of it
      twin validate --hw my-machine.json --from llama-bench.jsonl
    """
    from msgspec import to_builtins  # noqa: PLC0415

    files, given = ask.benchmarks_of(benchmarks, hw)
    check_outputs(output)
    if files:
        if recorded or public or device is not None or keep or quick or groups:
            raise click.UsageError("--from goes without --recorded, --public, --device, --quick, --group and --record")
        from calibrate.benchmarks.asking import evidence  # noqa: PLC0415
        from calibrate.benchmarks.comparing import compare_points  # noqa: PLC0415
        from calibrate.benchmarks.points import Given  # noqa: PLC0415
        from calibrate.validation import validation_text  # noqa: PLC0415

        validation, text = compare_points(evidence(files, Given(**given))), validation_text
    elif device is None:
        if keep or quick or groups:
            raise click.UsageError("--quick, --group and --record go with --device")
        if public and hw is not None:
            raise click.UsageError("--public is of many machines: it goes without --hw")
        validation, text = _recorded(hw, public=public)
    else:
        if hw is None or recorded or public:
            raise click.UsageError(
                "--device needs --hw, the profile to judge, and goes without --recorded and --public"
            )
        from calibrate.live import validate_live  # noqa: PLC0415
        from calibrate.measurements import check_record, record  # noqa: PLC0415
        from calibrate.validation import validation_text  # noqa: PLC0415

        if keep:
            check_record(hw)
        with progress_bar("validating") as progress:
            validation, measurements = validate_live(
                hw, device, quick=quick, groups=groups or ("grid",), progress=progress
            )
        for row in measurements.left_out:
            click.echo(f"left out: {row.case.id}: {row.reason}", err=True)
        if keep:
            click.echo(f"recorded in {record(measurements, hw)}", err=True)
        text = validation_text
    deliver(dump(to_builtins(validation)) if as_json else text(validation), output)
    return 0 if validation.within else EXIT_OUTSIDE_TOLERANCE


def _recorded(hw: str | None, *, public: bool) -> tuple[Any, Any]:
    """What was recorded of a machine or of all, or what is public; and how it is told."""
    if public:
        from calibrate.published.public import public_text, validate_public  # noqa: PLC0415

        return validate_public(), public_text
    from calibrate.records import validate_records  # noqa: PLC0415
    from calibrate.validation import validation_text  # noqa: PLC0415

    return validate_records(hw), validation_text


@twin.command(epilog=EXIT_CODES)
@with_options(ask.QUALITY_OPTIONS)
@JSON
@OUT
def quality(*, explain: bool, as_json: bool, output: Path | None, **asked: Any) -> int:
    """Measure what cache formats do to attention. On made-up heads or your own, beside what is published.

    \b
    Examples:
      twin quality
      twin quality --kv-dtype int4_per_token_head,fp8 --explain
      twin quality --tensors dumped.safetensors --model qwen3.8-27b --device cuda
    """
    from calibrate.quality.measure import measure_quality  # noqa: PLC0415
    from calibrate.quality.report import quality_json, quality_text  # noqa: PLC0415

    check_outputs(output, read={"--tensors": asked["tensors"]})
    with progress_bar("measuring") as progress:
        measured = measure_quality(**asked, progress=progress)
    deliver(dump(quality_json(measured)) if as_json else quality_text(measured, explain=explain), output)
    return 0


@twin.command(epilog=EXIT_CODES)
@click.option("--device", help="What to measure: cuda:0, cuda:1 or cpu [default: cuda:0].")
@click.option("--quick", is_flag=True, help="Under three minutes instead of under ten; wider intervals.")
@click.option("--name", help="What the profile calls the machine [default: the file's name].")
@click.option("-o", "--output", type=FILE, required=True, help="The profile to write, such as my-machine.json.")
@click.option(
    "--hw", type=Name("machine"), help="With --from: the machine that the files are of [default: as they say]."
)
@with_options(ask.BENCHMARK_OPTIONS)
def calibrate(
    *, device: str | None, quick: bool, name: str | None, output: Path, hw: str | None, **benchmarks: Any
) -> int:
    """Measure this machine and write its profile. An interrupted run is continued by the same command.

    With --from nothing is measured: rates are fitted to what an engine's own benchmark measured, here or elsewhere.

    \b
    Examples:
      twin calibrate -o my-machine.json
      twin calibrate --device cpu --quick -o my-cpu.json
      twin predict --hw ./my-machine.json --engine twin
      twin calibrate --from llama-bench.jsonl --model llama-3.1-8b -o my-machine.json
      twin calibrate --from perf.txt --hw 3090 --model qwen3.8-27b --kv-dtype exl3_k8v8 -o my-machine.json
    """
    files, given = ask.benchmarks_of(benchmarks, hw)
    if files:
        if device is not None or quick:
            raise click.UsageError("--from measures nothing: it goes without --device and --quick")
        return _calibrate_from(files, given, name=name, output=output)
    if hw is not None:
        raise click.UsageError("--hw goes with --from: without it this machine is measured")
    from calibrate.session import run_calibration  # noqa: PLC0415

    with progress_bar("calibrating") as progress:
        outcome = run_calibration(
            device=device or "cuda:0",
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


def _calibrate_from(files: list[Path], given: dict[str, Any], *, name: str | None, output: Path) -> int:
    from calibrate.benchmarks.points import Given  # noqa: PLC0415
    from calibrate.benchmarks.summary import calibrate_from, outcome_text, strange  # noqa: PLC0415

    outcome = calibrate_from(files, Given(**given), name=name, output=output)
    for told in strange(outcome):
        click.echo(f"warning: {told}", err=True)
    deliver(outcome_text(outcome), None)
    return 0


@twin.command()
@JSON
def machine(*, as_json: bool) -> int:
    """Show this computer and the shipped profile that fits it. Its cards, links and memory as they are now."""
    from calibrate.machine.here import here, here_json, here_text  # noqa: PLC0415

    found = here()
    deliver(dump(here_json(found)) if as_json else here_text(found), None)
    return 0


@twin.command()
@click.argument("name", type=Name("machine"), required=False)
@click.option("--rungs", is_flag=True, help="How far rates are off that nobody measured on a machine.")
@JSON
def profiles(*, name: str | None, rungs: bool, as_json: bool) -> int:
    """List the machines, or every rate of one. With spread, source and date."""
    if rungs:
        from twin.render.catalogue import rungs as listed  # noqa: PLC0415

        if name is not None:
            raise click.UsageError("--rungs is of all machines: it goes without a name")
        deliver(listed(as_json=as_json), None)
        return 0
    return _list("profile", name, as_json=as_json)


@twin.command()
@click.argument("what", type=Name("model"), required=False)
@click.option("--weights", help="The same shape in other weights: bf16, fp8, awq, q4_k_m, 4.05bpw and so on.")
@click.option("--save", type=FILE, help="Write the model in the project's own format, to be edited by hand.")
@JSON
def models(*, what: str | None, weights: str | None, save: Path | None, as_json: bool) -> int:
    """List the models, or what is understood of one. Layers, parameters, weights, cache, and the keys behind them.

    \b
    Examples:
      twin models llama-3.1-8b
      twin models ./config.json --json
      twin models model.gguf --save my-model.json
      twin models qwen3-8b --weights q4_k_m
      twin models Qwen/Qwen3-8B                  from the hub's cache, or fetched: the configuration only
    """
    from twin.render.model import listed, saved  # noqa: PLC0415

    check_outputs(save)
    text = listed(what, weights=weights, as_json=as_json, saves=save is not None)
    if what is not None and save is not None:
        deliver(saved(what, weights=weights), save)
    deliver(text, None)
    return 0


@twin.command()
@click.argument("name", type=Name("format"), required=False)
@click.option("--hw", type=Name("machine"), help="Where each is faster than bf16 on this machine.")
@JSON
def formats(*, name: str | None, hw: str | None, as_json: bool) -> int:
    """List the cache formats, or all about one. With their bytes and the engines that keep them."""
    return _list("format", name, as_json=as_json, hw=hw)


@twin.command()
@JSON
def layouts(*, as_json: bool) -> int:
    """List the layouts and the engines that have them."""
    return _list("layout", None, as_json=as_json)


def _list(kind: str, name: str | None, *, as_json: bool, hw: str | None = None) -> int:
    from twin.render import catalogue  # noqa: PLC0415

    deliver(catalogue.listed(kind, name, as_json=as_json, hw=hw), None)
    return 0


@twin.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> int:
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
        deliver(kind(context.find_root().command, {}, "twin", "_TWIN_COMPLETE").source(), None)
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with a documented exit code; only a bug shows a traceback."""
    if arguments is None:
        stopping.own_process()
    sys.exit(stopping.leaving_with(end(twin, sys.argv[1:] if arguments is None else arguments)))


if __name__ == "__main__":
    main()
stopping.restore(_before)  # whoever imports this has signals of its own
