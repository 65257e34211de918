"""What fusion does to real architectures: ``python -m benchmarks.fusion``.

A table by model: kernels a layer and in all, the bytes between kernels and the traffic of activations, without fusion
and with it, the verdicts by pass, and for every layer with more kernels than it should have those that explain it;
then the time of our pipeline with fusion against itself without, in turns, and the time that fusion's passes take.

A kernel is a call that is left in a module before the virtual machine's lowering: those that only rename memory, and
those on weights alone (computed when a model is built), are none.  Symbolic dimensions count as 64.

``--check`` asks that every layer is at most 6 kernels (norm + QKV + rotary, attention, output projection + residual,
norm + gate/up + activation, down + residual, one spare) and 3 more for each further attention in it (norm + Q,
attention, output projection + residual); that of each model's traffic at most half is left, that of its entries'
inputs and results aside (kept keys and values, above all: they are read, and handed back, in any case); that nothing is
slower; and that fusion's passes take under 10 s at 10,000 bindings.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from crossloom.targets import get_target

from . import command, fusion_speed, passes
from .fusion_count import Count, Entry, count, unfused
from .fusion_models import NAMES, Source, Unavailable

KERNELS, MORE_PER_ATTENTION, TRAFFIC = 6, 3, 0.5
BINDINGS, SECONDS, GROWTH = (1000, 10000), 10.0, 20.0
#: Entries that are timed; all of a model's, where none are named.
TIMED: dict[str, tuple[str, ...]] = {"shapes3": (), "vit-s14": (), "smollm2": ("prefill", "decode")}

#: Wide where it goes to a file, so that tables stay readable.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)


@dataclass
class LayerRow:
    """A layer's kernels without and with fusion, how many it should have at most, and what explains more."""

    name: str
    before: int
    after: int
    limit: int
    kernels: list[str] = field(default_factory=list)
    why: list[str] = field(default_factory=list)


@dataclass
class EntryRow:
    """An entry's figures; each pair is without and with fusion."""

    model: str
    entry: str
    layers: list[LayerRow]
    kernels: tuple[int, int]
    between_bytes: tuple[int, int]
    traffic_bytes: tuple[int, int]
    outside_bytes: tuple[int, int]

    @property
    def left(self) -> float:
        """What is left of the traffic."""
        return self.traffic_bytes[1] / max(1, self.traffic_bytes[0])

    @property
    def left_inside(self) -> float:
        """What is left of the traffic beyond that of inputs and results, each moved once."""
        return _left_inside([self])


@dataclass
class ModelRow:
    """A model's entries and verdicts (pass -> fired, refused); ``missing`` says why there are none."""

    name: str
    entries: list[EntryRow] = field(default_factory=list)
    verdicts: dict[str, tuple[int, int]] = field(default_factory=dict)
    missing: str = ""

    @property
    def left_inside(self) -> float:
        """What is left of its entries' traffic beyond that of inputs and results, each moved once."""
        return _left_inside(self.entries)


def _left_inside(entries: Sequence[EntryRow]) -> float:
    before, after = (sum(e.traffic_bytes[i] - e.outside_bytes[i] for e in entries) for i in range(2))
    return max(0, after) / max(1, before)


def measure(name: str, source: Source) -> ModelRow:
    """Count one model's kernels without and with fusion."""
    try:
        model = source.load(name)
    except Unavailable as problem:
        return ModelRow(name, missing=str(problem))
    target = get_target("host")
    before, after = count(model, target, unfused()), count(model, target)
    fused = set(unfused())
    tally: Counter[tuple[str, bool]] = Counter((v.pass_name, v.fired) for v, _ in after.verdicts)
    verdicts = {p: (tally[p, True], tally[p, False]) for p in dict.fromkeys(v.pass_name for v, _ in after.verdicts)}
    row = ModelRow(name, verdicts={p: n for p, n in verdicts.items() if p in fused or p.startswith("canonicalize")})
    for entry in model.entries:
        one, two = before.entries[entry], after.entries[entry]
        pairs = ((len(e.kernels), e.between_bytes, e.traffic_bytes, e.outside_bytes) for e in (one, two))
        row.entries.append(EntryRow(name, entry, _layers(entry, one, two, after), *zip(*pairs)))
    return row


def _layers(entry: str, before: Entry, after: Entry, counted: Count) -> list[LayerRow]:
    old, new = before.by_region(), after.by_region()
    rows = []
    for region in after.regions:
        if region.layer < 0 or not region.attentions:
            continue
        limit = KERNELS + MORE_PER_ATTENTION * (region.attentions - 1)
        row = LayerRow(region.name, len(old.get(region.name, ())), len(new.get(region.name, ())), limit)
        if row.after > limit:
            row.kernels = new[region.name]
            row.why = list(dict.fromkeys(_why(entry, region.name, counted))) or ["no verdict"]
        rows.append(row)
    return rows


def _why(entry: str, region: str, counted: Count) -> list[str]:
    """Return the refusals of fusion at the bindings of a region."""
    fusion = set(unfused()) | {"canonicalize-transformer"}
    return [
        f"{v.pass_name}: {v.code} ({', '.join(filter(None, (v.culprit, v.detail)))})"
        for v, place in counted.verdicts
        if not v.fired and v.function == entry and place == region and v.pass_name in fusion
    ]


def pass_seconds() -> dict[str, dict[int, float]]:
    """Return CPU seconds of fusion's passes by the number of bindings."""
    return passes.measure(BINDINGS, unfused())


def shortfalls(rows: Sequence[ModelRow], seconds: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Return what falls short of the figures asked, but for speed."""
    out = [f"{row.name}: {row.missing}" for row in rows if row.missing]
    for model in (row for row in rows if row.left_inside > TRAFFIC):
        out.append(f"{model.name}: {model.left_inside:.0%} of the traffic inside is left, asked {TRAFFIC:.0%}")
    for entry in (e for row in rows for e in row.entries):
        where = f"{entry.model}, {entry.entry}"
        for layer in entry.layers:
            if layer.after > layer.limit:
                out.append(f"{where}, {layer.name}: {layer.after} kernels, asked {layer.limit}")
    small, large = BINDINGS
    total = sum(row.get(large, 0.0) for row in seconds.values())
    if total > SECONDS:
        out.append(f"fusion's passes: {total:.1f} s at {large} bindings, asked {SECONDS:g}")
    for name, row in seconds.items():
        if row.get(large, 0.0) > 0.5 and row[large] > GROWTH * max(row[small], 0.005):
            out.append(f"{name}: grows {row[large] / max(row[small], 0.005):.0f}-fold from {small} to {large} bindings")
    return out


def show(rows: Sequence[ModelRow]) -> None:
    """Print the tables of structure."""
    table = Table(title="Kernels and bytes, without fusion and with it", title_justify="left")
    for head in (
        "model",
        "entry",
        "layers",
        "kernels a layer",
        "kernels",
        "MB between",
        "MB traffic",
        "left",
        "MB in, out",
        "left inside",
    ):
        table.add_column(head, justify="left" if head in ("model", "entry") else "right")
    for row in rows:
        if row.missing:
            table.add_row(row.name, row.missing)
        for entry in row.entries:
            span = [_span([getattr(layer, side) for layer in entry.layers]) for side in ("before", "after")]
            table.add_row(
                entry.model,
                entry.entry,
                str(len(entry.layers)),
                " -> ".join(span) if entry.layers else "-",
                f"{entry.kernels[0]} -> {entry.kernels[1]}",
                " -> ".join(f"{b / 1e6:.2f}" for b in entry.between_bytes),
                " -> ".join(f"{b / 1e6:.2f}" for b in entry.traffic_bytes),
                f"{entry.left:.0%}",
                f"{entry.outside_bytes[1] / 1e6:.2f}",
                f"{entry.left_inside:.0%}",
            )
    console.print(table)
    names = list(dict.fromkeys(name for row in rows for name in row.verdicts))
    verdicts = Table(title="Verdicts by pass: made / refused", title_justify="left")
    verdicts.add_column("pass")
    shown = [row for row in rows if not row.missing]
    for row in shown:
        verdicts.add_column(row.name, justify="right")
    for name in names:
        verdicts.add_row(name, *("{}/{}".format(*row.verdicts.get(name, (0, 0))) for row in shown))
    console.print(verdicts)
    for entry in (e for row in rows for e in row.entries):
        alike: dict[tuple[str, ...], list[LayerRow]] = {}
        for layer in (one for one in entry.layers if one.after > one.limit):
            alike.setdefault((*layer.kernels, *(why.split(" (")[0] for why in layer.why)), []).append(layer)
        for first, *others in alike.values():
            more = f" and {len(others)} more like it" if others else ""
            console.print(
                f"{entry.model}, {entry.entry}, {first.name}{more}: {first.after} kernels, asked {first.limit}: "
                f"{', '.join(first.kernels)}",
                markup=False,
            )
            for why in first.why:
                console.print(f"    {why}", markup=False)


def _span(numbers: Sequence[int]) -> str:
    return f"{min(numbers)}" if len(set(numbers)) == 1 else f"{min(numbers)}-{max(numbers)}" if numbers else "-"


def show_speed(rows: Sequence[fusion_speed.Timing]) -> None:
    """Print the table of times."""
    table = Table(title="Microseconds a call on this machine, the fastest of turns", title_justify="left")
    for head in ("model", "entry", "unfused", "fused", "times as fast", "difference"):
        table.add_column(head, justify="left" if head in ("model", "entry") else "right")
    for row in rows:
        figures = (f"{row.unfused_us:.0f}", f"{row.fused_us:.0f}", f"{row.gain:.2f}", f"{row.difference:.1e}")
        table.add_row(row.model, row.entry, *figures)
    console.print(table)
    console.print(f"geometric mean: {fusion_speed.geometric_mean(rows):.2f} times as fast")


def main() -> int:
    """Print the tables; see the module's docstring."""
    parser = command.parser(__doc__)
    parser.add_argument("--models", default=",".join(NAMES), help="names, separated by commas")
    parser.add_argument("--no-speed", action="store_true", help="leave the times out")
    parser.add_argument("--cache", type=Path, help="folder for imports and packages")
    parser.add_argument("--torch-python", type=Path, help="Python of the environment with PyTorch and transformers")
    args = parser.parse_args()
    names = [name for name in args.models.split(",") if name]
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"no model {unknown[0]!r}: {', '.join(NAMES)}")
    source = Source.default(args.cache, args.torch_python)
    rows = []
    for name in names:
        start = time.perf_counter()
        rows.append(measure(name, source))
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    show(rows)
    seconds = pass_seconds()
    total = {size: sum(row.get(size, 0.0) for row in seconds.values()) for size in BINDINGS}
    console.print("fusion's passes: " + ", ".join(f"{s:.2f} s at {n} bindings" for n, s in total.items()))
    each = ", ".join(f"{name} {row.get(BINDINGS[-1], 0.0):.2f}" for name, row in seconds.items())
    console.print(f"  at {BINDINGS[-1]}: {each}")
    timings: list[fusion_speed.Timing] = []
    if not args.no_speed:
        for name in (n for n in names if n in TIMED):
            try:
                timings += fusion_speed.measure(name, source.load(name), TIMED[name])
            except Unavailable as problem:
                print(f"{name}: not timed: {problem}", file=sys.stderr)
        show_speed(timings)
    report = {"models": [asdict(row) for row in rows], "pass_seconds": seconds}
    report["times"] = [asdict(row) | {"gain": row.gain} for row in timings]
    return command.finish(args, report, lambda: [*shortfalls(rows, seconds), *fusion_speed.shortfalls(timings)])


if __name__ == "__main__":
    sys.exit(main())
