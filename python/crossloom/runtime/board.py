"""A session on a board that runs a TVM RPC server, alone or behind a tracker."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from typing import Any

from tvm import rpc

from crossloom.errors import InternalError, ToolchainFailed, UsageError
from crossloom.runtime.watchdog import watchdog

_REQUEST_SECONDS = 600.0  # all boards of a tracker may be busy


class Board:
    """A connection to a board.

    Parameters
    ----------
    address : str
        ``"host:port"`` of the server, or of the tracker.
    key : str
        The server's key; with a tracker, the kind of board asked for.
    tracker : bool
        Whether `address` is a tracker.
    session_seconds : float
        The server ends the session after this long.
    connect_seconds : float
        Longest time a server may take to answer.

    Attributes
    ----------
    session : tvm.rpc.RPCSession

    Raises
    ------
    UsageError
        The address is malformed.
    ToolchainFailed
        Nothing answers there, or the key does not match.
    """

    def __init__(
        self,
        address: str,
        key: str = "",
        tracker: bool = False,
        session_seconds: float = 3600.0,
        connect_seconds: float = 15.0,
    ) -> None:
        match = re.fullmatch(r"\[?([^\s\[\]]+)\]?:(\d{1,5})", address)
        if not match or int(match[2]) > 65535:
            raise UsageError(f"`{address}` is no address", 'give "host:port"')
        host, port = match[1], int(match[2])
        if tracker and not key:
            raise UsageError("a tracker needs a key", "name the kind of board, e.g. rk3588")
        self.command = ["rpc", address, *([key] if key else [])]
        self._timed_out = False
        self.session: Any = None
        try:
            # A fast, bounded check: TVM's own connect has no time limit.
            socket.create_connection((host, port), connect_seconds).close()
        except OSError as err:
            raise ToolchainFailed(self.command, 1, f"nothing answers at {address}: {err}") from err
        self._before = _open_sockets()
        self._port = None if tracker else port  # a tracker says later which board it is
        try:
            timeout = max(1, int(session_seconds))
            with self.limit(_REQUEST_SECONDS if tracker else connect_seconds):
                if tracker:
                    found = rpc.connect_tracker(host, port)
                    self.session = found.request(key, session_timeout=timeout, max_retry=1)
                else:
                    self.session = rpc.connect(host, port, key, session_timeout=timeout)
        except Exception as err:
            raise ToolchainFailed(self.command, None if self._timed_out else 1, str(err)) from err

    def limit(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Hang up when the body takes longer than `seconds`; the waiting call then fails."""
        return watchdog(seconds, self._expire)

    def _expire(self) -> None:
        self._timed_out = True
        self._hang_up()

    def failure(self, err: Exception) -> Exception:
        """Return what `err`, raised while talking to the board, means."""
        text = str(err)
        if self._timed_out:
            return ToolchainFailed(self.command, None, text)
        if any(sign in text for sign in ("kShutdown", "Channel closes", "Socket", "SessionTimeout")):
            return ToolchainFailed(self.command, 1, text)
        return InternalError(f"the compiled model failed on the board: {text.strip().splitlines()[-1]}")

    def close(self) -> None:
        """End the session."""
        self.session = None

    def _hang_up(self) -> None:
        # TVM does not give its socket away: it is among those opened since, to the board's port.
        for descriptor, _ in _open_sockets() - self._before:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                peer = copy.getpeername()
                if isinstance(peer, tuple) and self._port in (None, peer[1]):
                    copy.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> set[tuple[int, str]]:
    """Return descriptors with the sockets that they are of: a number is given again when its socket is closed."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (link := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                found.add((int(name), link))
    return found
