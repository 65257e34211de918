"""An example of a plugin: a subcommand, a target and two passes."""

from __future__ import annotations

from pathlib import Path

import typer


def plugin(app: typer.Typer) -> None:
    """Add the subcommand ``greet``."""

    @app.command()
    def greet(name: str) -> None:
        """Greet somebody."""
        typer.echo(f"hello {name}")


def takes_a_name(app: typer.Typer) -> None:
    """Add a subcommand under a name that is taken."""

    @app.command("doctor")
    def mine() -> None:
        typer.echo("the wrong doctor")


def target_file() -> Path:
    """Return the path of the target's table."""
    return Path(__file__).with_name("toaster.toml")
