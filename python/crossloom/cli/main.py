"""Entry point of ``tvmc``: assemble the subcommands, run one, turn its errors into an exit code.

Exit codes: 0 done, 2 usage, 3 unsupported model or target, 4 budget exceeded, 5 tool chain, 70 internal error,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from crossloom import __version__
from crossloom.errors import CrossloomError, CrossloomWarning, InternalError, ToolchainFailed

from . import compile, doctor, explain, inspect, interrupt, lint, passes, run, targets, verify
from .plugins import load_plugins

USAGE, INTERNAL, INTERRUPTED = 2, 70, 130

#: Typer brings click along or depends on it, by version; either way this is the base of its errors.
_ClickException: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

_COMMANDS = (
    ("compile", compile.command),
    ("run", run.command),
    ("verify", verify.command),
    ("explain", explain.command),
    ("inspect", inspect.command),
    ("lint", lint.command),
    ("targets", targets.command),
    ("passes", passes.command),
    ("doctor", doctor.command),
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tvmc (crossloom) {__version__}")
        raise typer.Exit()


def build_app() -> typer.Typer:
    """Return the application with all subcommands, those of plugins included."""
    app = typer.Typer(
        name="tvmc",
        help="Compile multimodal models for Arm CPUs and NPUs with Apache TVM, run them, and account for it.",
        no_args_is_help=True,
        add_completion=False,
        # Plain help: rich's takes longer to load than all else together.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
        ] = False,
        debug: Annotated[
            bool, typer.Option("--debug", help="Show the traceback of an error; accepted anywhere.")
        ] = False,
    ) -> None:
        pass

    for name, function in _COMMANDS:
        app.command(name)(function)
    load_plugins(app)
    return app


def _complain(message: str, remedy: str = "") -> None:
    """Write an error as one line, and its remedy as a second."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    if remedy:
        typer.echo(f"  {' '.join(remedy.split())}", err=True)


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Show a warning of ours as one line; others are for developers."""
    if issubclass(category, CrossloomWarning):
        typer.echo(f"warning: {' '.join(str(message).split())}", err=True)


def _report(error: CrossloomError, debug: bool) -> int:
    remedy = error.remedy
    if isinstance(error, ToolchainFailed):
        if debug:
            typer.echo(error.log, err=True)
        lines = error.log.strip().splitlines()
        remedy = f"its last words: {lines[-1]} (--debug shows all)" if lines else "it printed nothing"
    elif isinstance(error, InternalError) and not remedy:
        remedy = "this is a bug of crossloom; --debug shows where"
    _complain(error.message, remedy)
    return error.exit_code


def execute(arguments: Sequence[str]) -> int:
    """Run ``tvmc`` with these arguments and return its exit code; never raises.

    Parameters
    ----------
    arguments : sequence of str
        Without the program's name.
    """
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)
    debug = "--debug" in given[:end]
    given = [a for a in given[:end] if a != "--debug"] + given[end:]
    try:
        command = typer.main.get_command(build_app())
        result = command.main(args=given, prog_name="tvmc", standalone_mode=False)
        sys.stdout.flush()
        if result == INTERRUPTED:  # Typer makes a number of the interrupt
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except _ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)  # type: ignore[attr-defined]
            return USAGE
        context = getattr(error, "ctx", None)
        _complain(
            error.format_message(),  # type: ignore[attr-defined]
            f"see `{context.command_path if context else 'tvmc'} --help`",
        )
        return USAGE
    except BrokenPipeError:
        # The reader of our output has left: nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except CrossloomError as error:
        if debug:
            traceback.print_exc()
        return _report(error, debug)
    except MemoryError:
        _complain("out of memory", "compile fewer entries, or give the machine more memory")
        return 4
    except Exception as error:
        if debug:
            traceback.print_exc()
        text = str(error).strip()
        first = text.splitlines()[-1].strip() if text else ""
        _complain(
            f"internal error: {type(error).__name__}: {first}" if first else f"internal error: {type(error).__name__}",
            "this is a bug of crossloom; run again with --debug for the traceback",
        )
        return INTERNAL


def main() -> None:
    """Run ``tvmc`` as a program."""
    warnings.showwarning = _show_warning
    interrupt.install()
    sys.exit(execute(sys.argv[1:]))


if __name__ == "__main__":
    main()
