"""``tvmc targets``: what can be compiled for, and what each can run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments as args
from .console import print_json, print_table, progress, size_text

if TYPE_CHECKING:
    from crossloom.targets import Target


def command(
    name: Annotated[str | None, typer.Argument(help="Target to describe.", metavar="NAME")] = None,
    ops: Annotated[
        str | None, typer.Option("--ops", help="What targets say of these operators: matmul,conv2d.", metavar="OPS")
    ] = None,
    as_json: args.Json = False,
) -> None:
    """List the targets, describe one, or ask what they say of an operator."""
    with progress("loading TVM"):
        from crossloom.targets import get_target, list_targets

        chosen = [get_target(name)] if name is not None else list(list_targets().values())
    if ops is not None:
        _print_ops(args.parse_names([ops]), chosen, as_json)
    elif as_json:
        print_json([_summary(target) for target in chosen])
    elif name is not None:
        _describe(chosen[0])
    else:
        rows = [
            (t.name, t.description, t.triple or t.cpu.kind, t.cpu.mcpu, t.npu.platform if t.npu else "-")
            for t in chosen
        ]
        print_table("", ("target", "description", "triple", "cpu", "npu"), rows)


def _summary(target: Target) -> dict[str, object]:
    return {
        "name": target.name,
        "description": target.description,
        "family": target.family,
        "cpu": asdict(target.cpu),
        "npu": asdict(target.npu) if target.npu else None,
        "banks": [asdict(bank) for bank in target.banks],
        "precisions": [asdict(row) for row in target.precisions],
        "bandwidth": target.bandwidth,
        "bandwidth_source": target.bandwidth_source,
        "capability_rows": len(target.capabilities),
    }


def _describe(target: Target) -> None:
    cpu, npu = target.cpu, target.npu
    rows = [("target", f"{target}: {target.description}"), ("triple", target.triple or cpu.kind)]
    rows.append(("cpu", f"{cpu.mcpu or cpu.kind} {' '.join(cpu.mattr)}; {cpu.num_cores or '?'} cores [{cpu.source}]"))
    rows += [(f"cluster {c.name}", f"{c.count} x {c.core}, {c.clock_mhz} MHz [{c.source}]") for c in cpu.clusters]
    if npu is not None:
        rows.append(("npu", f"{npu.platform} ({npu.codegen}), {npu.cores} cores, {npu.tops:g} TOPS [{npu.source}]"))
    if target.bandwidth:
        rows.append(("bandwidth", f"{target.bandwidth / 1e9:.1f} GB/s [{target.bandwidth_source}]"))
    rows += [
        (
            f"bank {b.name}",
            f"{size_text(b.bytes)} of {b.unit} {b.kind}{'' if b.verified else ', unverified'} [{b.source}]",
        )
        for b in target.banks
    ]
    print_table("", ("", ""), rows)
    print_table(
        "Precision",
        ("scheme", "unit", "supported", "granularity", "source"),
        [(p.name, p.unit, p.supported, " ".join(p.granularity), p.source) for p in target.precisions],
    )
    typer.echo(f"\n{len(target.capabilities)} capability rows; `tvmc targets {target.name} --ops matmul` asks them")


def _print_ops(ops: list[str], chosen: list[Target], as_json: bool) -> None:
    from crossloom.targets import compatibility

    lines = [line for op in ops for line in compatibility(op, chosen)]
    if as_json:
        print_json([asdict(line) for line in lines])
        return
    rows = [(c.op, c.target, c.unit, c.answer, "; ".join(c.conditions), c.source, c.confidence) for c in lines]
    print_table("", ("operator", "target", "unit", "answer", "conditions", "source", "confidence"), rows)
