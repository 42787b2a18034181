"""`twin completion`: the script that teaches a shell to complete the names of commands, options and what is shipped."""

import click

from twin.cli.delivery import deliver


@click.command()
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
