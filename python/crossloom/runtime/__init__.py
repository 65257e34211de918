"""Run bundles: ``open_session(bundle, device=...)`` gives a :class:`Session` with one interface for every device."""

from __future__ import annotations

import os
from typing import Literal

from crossloom.bundle import Bundle
from crossloom.bundle.link import host_arch
from crossloom.errors import UsageError
from crossloom.runtime.session import Connection, DeviceTensor, Session

__all__ = ["DEVICES", "DeviceTensor", "Session", "open_session"]

DEVICES = ("auto", "host", "host-process", "qemu", "rpc")

#: Longest time limit (seconds): three years, which clocks and the board's 32-bit counters still hold.
MAX_TIMEOUT_S = 1e8


def open_session(
    bundle: Bundle | str | os.PathLike[str],
    device: Literal["auto", "host", "host-process", "qemu", "rpc"] = "auto",
    *,
    timeout_s: float = 600.0,
    address: str = "",
    key: str = "",
    tracker: bool = False,
    cross_compiler: str | None = None,
    emulator: str | None = None,
) -> Session:
    """Load a bundle on a device.

    Parameters
    ----------
    bundle : Bundle or path
        A path is opened, and closed with the session.
    device : str
        ``"host"`` this process; ``"host-process"`` this machine, a process of its own, so that a crash is
        contained; ``"qemu"`` user-mode QEMU; ``"rpc"`` a board; ``"auto"`` host for a bundle of this machine,
        else QEMU.
    timeout_s : float
        Longest time of one call, in seconds, at most ``MAX_TIMEOUT_S``; cannot be kept on ``"host"``.
    address, key, tracker
        For ``"rpc"``: ``"host:port"`` of a TVM RPC server, or of a tracker with the key of the boards.
    cross_compiler : str, optional
        Builds the server for QEMU instead of the usual compiler.
    emulator : str, optional
        The QEMU program instead of ``qemu-<arch>``.

    Raises
    ------
    UsageError
        An unknown device, no usable time limit, a bundle of another machine, no address.
    ToolchainMissing, ToolchainFailed
        The server could not be built, started or reached.
    """
    if device not in DEVICES:
        raise UsageError(f"unknown device `{device}`", f"devices: {', '.join(DEVICES)}")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise UsageError(
            f"a time limit of {timeout_s} s cannot be kept", f"give one above 0, at most {MAX_TIMEOUT_S:g}"
        )
    owned = not isinstance(bundle, Bundle)
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    try:
        arch = opened.manifest.arch
        if device == "auto":
            device = "host" if arch == host_arch() else "qemu"
        if device in ("host", "host-process") and arch != host_arch():
            raise UsageError(
                f"{opened.path} is compiled for {arch}, this machine is {host_arch()}",
                'use device "qemu" or "rpc", or compile for the host',
            )
        connection = _connect(device, arch, address, key, tracker, cross_compiler, emulator, timeout_s)
        try:
            return Session(opened, connection, device, timeout_s, owns_bundle=owned)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
    except BaseException:
        if owned:
            opened.close()
        raise


def _connect(
    device: str,
    arch: str,
    address: str,
    key: str,
    tracker: bool,
    cross_compiler: str | None,
    emulator: str | None,
    timeout_s: float,
) -> Connection | None:
    # Imported here: the host needs neither sockets nor processes.
    from crossloom.runtime.board import Board
    from crossloom.runtime.process import ServerProcess, qemu_command

    if device == "host":
        return None
    if device == "host-process":
        return ServerProcess(arch)
    if device == "qemu":
        return ServerProcess(arch, qemu_command(arch, emulator), cross_compiler)
    if not address:
        raise UsageError('device "rpc" needs an address', "give the host:port of a TVM RPC server or tracker")
    return Board(address, key, tracker, session_seconds=max(3600.0, 2 * timeout_s))
