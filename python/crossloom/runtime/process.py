"""Our RPC server in a process of its own, natively or under QEMU, connected by two pipes."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm import rpc
from tvm.rpc import _ffi_api

from crossloom.errors import InternalError, ToolchainFailed, ToolchainMissing
from crossloom.runtime.board_libs import runtime_libs
from crossloom.runtime.cross import server_program
from crossloom.runtime.watchdog import watchdog

_START_SECONDS = 120.0
_LOG_TAIL_BYTES = 20_000

# Writes its process id, sends its errors to a file, and becomes the server; TVM appends the two descriptors.
_START = 'echo $$ >"$0/pid.tmp" && mv "$0/pid.tmp" "$0/pid" && exec "$@" 2>"$0/log"'


class ServerProcess:
    """A running server.

    Parameters
    ----------
    arch : str
        Machine the server is built for.
    emulator : sequence of str
        Command that runs a program of that machine, before the program; empty for this machine.
    cross_compiler : str, optional

    Attributes
    ----------
    session : tvm.rpc.RPCSession

    Raises
    ------
    ToolchainMissing, ToolchainFailed
        It could not be built or started.
    """

    def __init__(self, arch: str, emulator: Sequence[str] = (), cross_compiler: str | None = None) -> None:
        program, libs = server_program(arch, cross_compiler), runtime_libs(arch)
        self.folder = Path(tempfile.mkdtemp(prefix="crossloom-server-"))
        (self.folder / "work").mkdir()
        serve = [str(program), "--workdir", str(self.folder / "work"), "--libs", str(libs)]
        if emulator:
            self.command = [*emulator, "-E", f"LD_LIBRARY_PATH={libs}", *serve]
        else:
            self.command = ["/usr/bin/env", f"LD_LIBRARY_PATH={libs}", *serve]
        self.session: Any = None
        self._pid: int | None = None
        self._timed_out = False
        try:
            with self.limit(_START_SECONDS):
                argv = ["/bin/sh", "-c", _START, str(self.folder), *self.command]
                self.session = rpc.RPCSession(_ffi_api.CreatePipeClient(*argv))
        except Exception as err:
            failure = self.failure(err)
            self.close()
            raise failure from err

    @property
    def pid(self) -> int | None:
        """Process id of the server, None until it has started."""
        if self._pid is None:
            with contextlib.suppress(OSError, ValueError):
                self._pid = int((self.folder / "pid").read_text())
        return self._pid

    def limit(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Kill the server when the body takes longer than `seconds`; the waiting call then fails."""
        return watchdog(seconds, self._expire)

    def _expire(self) -> None:
        self._timed_out = True
        self._kill()

    def failure(self, err: Exception) -> Exception:
        """Return what `err`, raised while talking to the server, means.

        A server that is gone gives ToolchainFailed with what it printed; a living one reported an error of the
        model it runs.
        """
        if self._timed_out:
            return ToolchainFailed(self.command, None, self.log())
        code = self._exit_code(5.0 if _hung_up(err) else 0.0)
        if code is None:
            return InternalError(f"the compiled model failed: {_last_line(err)}")
        return ToolchainFailed(self.command, code, self.log() or _last_line(err))

    def log(self) -> str:
        """Return the last of what the server wrote to its standard error."""
        try:
            with (self.folder / "log").open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def share(self, path: Path) -> str:
        """Put a file where the server can read it, without copying; returns the name it has there."""
        link = self.folder / "work" / path.name
        if not link.is_symlink():
            link.symlink_to(path.resolve())
        return link.name

    def close(self) -> None:
        """End the server and remove its folder."""
        self.session = None
        gc.collect()  # the channel closes with the last reference
        if self.pid is not None:
            self._kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill(self) -> None:
        deadline = time.monotonic() + 1.0
        while self.pid is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.pid is not None and self._exit_code(0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _exit_code(self, wait_seconds: float) -> int | None:
        """Return the exit code (negative for a signal), None while the server runs.  Does not reap it: its id must
        stay taken until the channel, which kills by id, is gone."""
        deadline = time.monotonic() + wait_seconds
        while True:
            if self.pid is None:
                return 127
            try:
                status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return 0
            if status is not None:
                return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)


def qemu_command(arch: str, emulator: str | None = None) -> list[str]:
    """Return the user-mode QEMU command for `arch`.

    Raises
    ------
    ToolchainMissing
        QEMU, or the C library of that machine, is not installed.
    """
    program = shutil.which(emulator or f"qemu-{arch}")
    if program is None:
        raise ToolchainMissing(f"{emulator or 'qemu-' + arch} not found", "apt-get install qemu-user")
    root = os.environ.get("QEMU_LD_PREFIX", f"/usr/{arch}-linux-gnu")
    if not Path(root).is_dir():
        raise ToolchainMissing(
            f"no C library for {arch} in {root}",
            f"apt-get install g++-{arch}-linux-gnu, or set QEMU_LD_PREFIX to a root file system",
        )
    return [program, "-L", root]


def _hung_up(err: Exception) -> bool:
    text = str(err)
    return any(sign in text for sign in ("kShutdown", "Channel closes", "Pipe write error", "Pipe read error"))


def _last_line(err: Exception) -> str:
    lines = [line for line in str(err).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(err).__name__
