"""``tvmc run``: call one entry of a bundle."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossloom.errors import UsageError

from . import arguments as args
from .console import print_json, print_table, progress, say

if TYPE_CHECKING:
    import numpy as np

DEVICES = ("auto", "host", "host-process", "qemu", "rpc")


def command(
    bundle: args.BundlePath,
    entry: Annotated[str | None, typer.Option("--entry", help="Entry to call; needed where there are several.")] = None,
    device: Annotated[str, typer.Option("--device", help=", ".join(DEVICES))] = "auto",
    inputs: Annotated[
        Path | None, typer.Option("--inputs", "-i", help="Inputs by name, an .npz file.", metavar="NPZ")
    ] = None,
    fill_mode: Annotated[
        str | None, typer.Option("--fill-mode", help="Makes the inputs that are not given: random, ones or zeros.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of --fill-mode random.", min=0)] = 0,
    bind: Annotated[
        list[str] | None, typer.Option("--bind", help="Size of a dynamic dimension to fill: T=100.", metavar="D=N")
    ] = None,
    print_time: Annotated[bool, typer.Option("--print-time", help="Time it on the device.")] = False,
    repeat: Annotated[int, typer.Option("--repeat", help="Measurements.", min=1)] = 3,
    number: Annotated[int, typer.Option("--number", help="Calls averaged in one measurement.", min=1)] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the outputs, an .npz file.", metavar="NPZ")
    ] = None,
    rpc: Annotated[str, typer.Option("--rpc", help="host:port of the board's RPC server.")] = "",
    rpc_tracker: Annotated[str, typer.Option("--rpc-tracker", help="host:port of an RPC tracker.")] = "",
    rpc_key: Annotated[str, typer.Option("--rpc-key", help="Key of the board.")] = "",
    cross_compiler: Annotated[
        str | None, typer.Option("--cross-compiler", help="Builds the server for QEMU.", metavar="CC")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Longest time of one call, in seconds.")] = 600.0,
    as_json: args.Json = False,
) -> None:
    """Run one entry of a bundle on this machine, under QEMU or on a board."""
    if device not in DEVICES:
        raise UsageError(f"--device: {device!r} is not known", f"devices: {', '.join(DEVICES)}")
    if output is not None:
        from .compile import check_output

        check_output(output)
    sizes = args.parse_sizes(bind)
    with progress("loading TVM") as show:
        from crossloom.bundle import Bundle
        from crossloom.runtime import open_session

        from .inputs import fill, read_npz, write_npz

        with Bundle.open(bundle) as opened:
            name = _chosen(list(opened.entries), entry, str(bundle))
            spec = opened.entry(name)
            given = read_npz(inputs, spec) if inputs is not None else {}
            if fill_mode is None and inputs is None:
                names = ", ".join(s.name for s in spec.inputs)
                raise UsageError(f"no inputs for entry {name!r}", f"give {names} with --inputs, or --fill-mode random")
            arrays, assumed = fill(spec, given, fill_mode, seed, sizes)
            show(f"starting {device}")
            with open_session(
                opened,
                device,  # type: ignore[arg-type]
                timeout_s=timeout,
                address=rpc_tracker or rpc,
                key=rpc_key,
                tracker=bool(rpc_tracker),
                cross_compiler=cross_compiler,
            ) as session:
                show(f"running {name}")
                results = session.run(name, arrays)
                seconds = session.time(name, arrays, repeat, number) if print_time else []
                where = session.device
    if assumed:
        say("sizes chosen for dimensions nobody gave: " + ", ".join(f"{k}={v}" for k, v in assumed.items()))
    named = {s.name: value for s, value in zip(spec.outputs, results)}
    if output is not None:
        write_npz(output, named)
    if as_json:
        report: dict[str, Any] = {"entry": name, "device": where, "outputs": [_row(k, v) for k, v in named.items()]}
        if seconds:
            report["seconds"] = seconds
        print_json(report)
        return
    rows = [_row(key, value) for key, value in named.items()]
    columns = ("name", "shape", "dtype", "min", "max", "mean")
    print_table("", columns, [[_cell(row[c]) for c in columns] for row in rows])
    if seconds:
        ms = [1000 * s for s in seconds]
        spread = statistics.stdev(ms) if len(ms) > 1 else 0.0
        print_table(
            "Execution time (ms)" + (", emulated: not the board's" if where == "qemu" else ""),
            ("mean", "median", "max", "min", "std"),
            [[f"{v:.4f}" for v in (statistics.mean(ms), statistics.median(ms), max(ms), min(ms), spread)]],
        )


def _chosen(entries: list[str], wanted: str | None, where: str) -> str:
    if wanted is not None:
        return wanted
    if len(entries) != 1:
        raise UsageError(f"{where} has several entries", f"choose with --entry: {', '.join(entries)}")
    return entries[0]


def _row(name: str, value: np.ndarray) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "shape": list(value.shape), "dtype": str(value.dtype)}
    wide = value.astype("float64")
    for key, number in (("min", wide.min), ("max", wide.max), ("mean", wide.mean)):
        row[key] = float(number()) if value.size else None
    return row


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
