"""A time limit for calls that have none of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def watchdog(seconds: float, expired: Callable[[], None]) -> Iterator[None]:
    """Call ``expired``, on another thread, when the body takes longer than ``seconds``.

    ``expired`` must make the waiting call fail, by ending what it waits for; it is never called after the body.
    """
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds):
            expired()

    watcher = threading.Thread(target=watch, name="crossloom-watchdog", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
