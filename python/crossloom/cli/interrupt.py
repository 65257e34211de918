"""Ctrl-C wherever it strikes: it ends the program, with one line."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

_AGAIN_SECONDS = 0.05


class _Hook:
    """Takes what Python cannot raise, because it happened in a destructor or a callback."""

    def __init__(self, usual: Callable[[Any], Any]) -> None:
        self._usual = usual
        self._interrupted = False

    def interrupt(self, number: int, frame: Any) -> None:
        """Handle the signal; from now on destructors that fail, of things half made, say nothing."""
        self._interrupted = True
        signal.default_int_handler(number, frame)

    def __call__(self, unraisable: Any, /) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._again()  # else it would be printed and lost
        elif not self._interrupted:
            self._usual(unraisable)

    @staticmethod
    def _again() -> None:
        # Not at once: it would strike in this very hook, which cannot raise either.
        # The signal itself, not `interrupt_main`, wakes a main thread that waits in a system call.
        main = threading.main_thread().ident
        timer = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main, signal.SIGINT))
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # at the end of the program no thread can start, nor need it
            timer.start()


def install() -> None:
    """Let Ctrl-C end this program without the tracebacks of destructors, and strike even inside one.

    For a program's main function only: it stays to the end, for some destructors run that late.
    """
    hook = _Hook(sys.unraisablehook)
    sys.unraisablehook = hook
    # Somebody who had us ignore the signal, such as nohup, meant it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, hook.interrupt)
