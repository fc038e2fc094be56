"""`loadgauge completion`: the script that completes commands, flags, models and GPUs in a shell."""

import click
from click.shell_completion import get_completion_class

from loadgauge.core.command_line.main import COMPLETE_VARIABLE, commands

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script of SHELL: commands, flags, their values, models of the catalogue and GPUs.

    \b
    loadgauge completion bash > ~/.local/share/bash-completion/completions/loadgauge
    loadgauge completion zsh > "${fpath[1]}/_loadgauge"
    loadgauge completion fish > ~/.config/fish/completions/loadgauge.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    written = kind(commands, {}, "loadgauge", COMPLETE_VARIABLE)
    click.echo(written.source_template % written.source_vars())
