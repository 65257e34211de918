"""A time limit for calls that have none of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

#: Seconds from one call to the next.
_AGAIN_S = 0.5


@contextlib.contextmanager
def watchdog(seconds: float, expired: Callable[[], None]) -> Iterator[None]:
    """Call ``expired``, on another thread, when the body takes longer than ``seconds``, and again while it still waits.

    ``expired`` must make the waiting call fail, by ending what it waits for: where there is nothing to end yet (a
    connection that is still being opened), the next call finds it.  It is never called after the body.
    """
    done = threading.Event()

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            expired()
            wait = _AGAIN_S

    watcher = threading.Thread(target=watch, name="crossloom-watchdog", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
