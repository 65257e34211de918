"""Errors a user can meet, each with the exit code `tvmc` ends with.

Every message names the thing at fault and says what to change.  A refused rewrite is not an error: it is
a :class:`crossloom.verdict.Verdict`.
"""

from __future__ import annotations

from collections.abc import Sequence


class CrossloomError(Exception):
    """Base of every error raised on purpose.

    Parameters
    ----------
    message : str
        What is wrong, naming the thing.
    remedy : str
        What the user can change; printed on a second line.
    """

    exit_code = 70

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message if not remedy else f"{message}\n{remedy}")
        self.message = message
        self.remedy = remedy

    @classmethod
    def revive(cls, text: str) -> CrossloomError:
        """Return an error of this class from what ``str`` gave of one; fields beyond message and remedy are lost."""
        error = cls.__new__(cls)
        message, _, remedy = text.partition("\n")
        CrossloomError.__init__(error, message, remedy)
        return error


class UsageError(CrossloomError):
    """The call itself is wrong: an unknown pass, option, file or value."""

    exit_code = 2


class CrossloomWarning(UserWarning):
    """Something was left out, and the rest goes on."""


class UnsupportedModel(CrossloomError):
    """The model cannot be imported or compiled; the message names the tensor or operator."""

    exit_code = 3


class UnsupportedTarget(CrossloomError):
    """The target is unknown or cannot run what was asked of it."""

    exit_code = 3


class BudgetExceeded(CrossloomError):
    """A memory or numerics budget was not met: says what was wanted, what was had, and the largest three."""

    exit_code = 4
    wanted, had = float("nan"), float("nan")
    largest: Sequence[tuple[str, float]] = ()

    def __init__(self, what: str, wanted: float, had: float, largest: Sequence[tuple[str, float]] = ()) -> None:
        top = ", ".join(f"{name} ({size:g})" for name, size in list(largest)[:3])
        super().__init__(f"{what}: wanted at most {wanted:g}, had {had:g}", f"largest: {top}" if top else "")
        self.wanted, self.had, self.largest = wanted, had, list(largest)[:3]


class ToolchainMissing(CrossloomError):
    """A tool is not installed; the remedy says how to get it."""

    exit_code = 5


class ToolchainFailed(CrossloomError):
    """A tool in its own process failed, crashed or hung.

    Parameters
    ----------
    command : sequence of str
        What was run.
    returncode : int or None
        Exit code; negative for a signal; None for a time-out.
    log : str
        What the tool printed; the message shows its last lines.
    """

    exit_code = 5
    command: Sequence[str] = ()
    returncode: int | None = None
    log = ""

    def __init__(self, command: Sequence[str], returncode: int | None, log: str) -> None:
        how = "timed out" if returncode is None else f"ended with {returncode}"
        tail = "\n".join(log.strip().splitlines()[-5:])
        super().__init__(f"`{' '.join(command)}` {how}", tail)
        self.command, self.returncode, self.log = list(command), returncode, log


class InternalError(CrossloomError):
    """A bug of ours; the module at fault was saved and the message says where."""

    exit_code = 70
