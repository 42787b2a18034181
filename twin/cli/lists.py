"""`twin profiles`, `models`, `formats`, `layouts`: what is shipped, and all about one of it."""

import click

from twin.cli.common import JSON, Name
from twin.cli.delivery import deliver


@click.command()
@click.argument("name", type=Name("machine"), required=False)
@JSON
def profiles(*, name: str | None, as_json: bool) -> int:
    """List the machines, or every rate of one. With spread, source and date."""
    return _show("profile", name, as_json=as_json)


@click.command()
@click.argument("name", type=Name("model"), required=False)
@JSON
def models(*, name: str | None, as_json: bool) -> int:
    """List the models, or the shape of one."""
    return _show("model", name, as_json=as_json)


@click.command()
@click.argument("name", type=Name("format"), required=False)
@click.option("--hw", type=Name("machine"), default=None, help="Where each is faster than bf16 on this machine.")
@JSON
def formats(*, name: str | None, hw: str | None, as_json: bool) -> int:
    """List the cache formats, or all about one. With their bytes and the engines that keep them."""
    return _show("format", name, as_json=as_json, hw=hw)


@click.command()
@JSON
def layouts(*, as_json: bool) -> int:
    """List the layouts and the engines that have them."""
    return _show("layout", None, as_json=as_json)


def _show(kind: str, name: str | None, *, as_json: bool, hw: str | None = None) -> int:
    from twin.render import catalogue  # noqa: PLC0415

    deliver(catalogue.listed(kind, name, as_json=as_json, hw=hw), None)
    return 0
