"""What fusing the rotary embedding and the MLP of a vision tower brings: ``python -m benchmarks.rotary_pareto``.

shapes3's vision tower (a ViT with 2-D rotary embedding, trained) is compiled three ways: as it is, with projections,
rotary and attention fused, and with everything fused.  For each: the time of one image on this machine (interleaved,
the best of the turns), how often the whole model answers held-out questions rightly with that tower in front of it, and
the tower's worst error against the model's numpy reference.  A variant is on the Pareto front when no other one is
both faster and at least as often right, or as fast and more often right.

``--check`` asks that every variant answers as often rightly as the reference does, stays within an error of 1e-3, and
that fusing all is not slower than fusing nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from benchmarks import command
from benchmarks.fidelity import answer, entry_errors
from benchmarks.timing import take_turns
from crossloom.driver import Compiled, compile_model
from crossloom.flow import steps
from crossloom.importers.load import load_model
from crossloom.models import shapes3
from crossloom.targets import get_target
from crossloom.testing.runner import flatten

#: What ``--check`` allows: normwise error of the tower, and its time as a share of the unfused one's.
MOST_ERROR, SLOWEST = 1e-3, 1.0
#: Passes of the first two stages, attention with its projections and rotary; the third adds all other fusions.
ATTENTION = frozenset({"fuse-parallel-projections", "fuse-rotary-projection", "fuse-attention"})
VARIANTS = ("ViT", "ViT + rotary", "ViT + rotary + MLP")
_SUFFIXES = (".svg", ".png")


@dataclass(frozen=True)
class Point:
    """One variant's figures.

    Attributes
    ----------
    name : str
    wall_us, cpu_us : float
        Of one image: wall time, and processor time of all threads (microseconds).
    kernels : int
        Calls of kernels in the vision entry.
    samples, right : int
        Questions asked of the whole model, and right answers.
    error : float
        Worst normwise error of the tower's features against the numpy reference.
    """

    name: str
    wall_us: float
    cpu_us: float
    kernels: int
    samples: int
    right: int
    error: float

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right / self.samples


def disabled(variant: str, target: Any) -> tuple[str, ...]:
    """Return the passes that a variant's pipeline leaves out."""
    fusing = [step.text.name for step in steps(target) if step.info.stage == "fuse"]
    left_in: dict[str, Callable[[str], bool]] = {
        "ViT": lambda name: False,
        "ViT + rotary": lambda name: name in ATTENTION,
        "ViT + rotary + MLP": lambda name: True,
    }
    return tuple(name for name in fusing if not left_in[variant](name))


def runner(compiled: Compiled) -> Callable[[str, dict[str, np.ndarray]], list[np.ndarray]]:
    """Return what runs the entries of a compiled model."""
    machine = relax.VirtualMachine(compiled.executable, tvm.cpu())

    def run(entry: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        return list(flatten(machine[entry](*_tensors(compiled, entry, inputs))))

    return run


def _tensors(compiled: Compiled, entry: str, inputs: dict[str, np.ndarray]) -> list[tvm.runtime.Tensor]:
    arrays = [inputs[spec.name] for spec in compiled.model.entries[entry].inputs]
    return [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in (*arrays, *compiled.model.entry_params(entry))]


def kernels(compiled: Compiled, entry: str) -> int:
    """Return how many kernels an entry calls."""
    calls = [
        binding.value
        for block in compiled.model.mod[entry].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    ]
    return sum(getattr(call.op, "name", "") == "relax.call_tir" for call in calls)


def measure(samples: int, turns: int, turn_s: float, say: Callable[[str], None] = lambda text: None) -> list[Point]:
    """Compile every variant and measure it.

    Parameters
    ----------
    samples : int
        Written questions to ask.
    turns, turn_s : int, float
        Turns, and the least time of one (seconds).
    say : callable
        Told what is being done.
    """
    host = get_target("host")
    model = load_model(shapes3.path() / "shapes3.toml")
    asked = shapes3.held_out(samples)
    images = [{"image": sample.image} for sample in asked]
    built: dict[str, Compiled] = {}
    for name in VARIANTS:
        say(f"compiling {name}")
        built[name] = compile_model(model, host, disabled=disabled(name, host))
    whole = runner(built[VARIANTS[-1]])
    timed: dict[str, Callable[[], Any]] = {}
    for name, compiled in built.items():
        function = relax.VirtualMachine(compiled.executable, tvm.cpu())["vision"]
        timed[name] = partial(function, *_tensors(compiled, "vision", images[0]))
    say("timing")
    wall, cpu = take_turns(timed, turns, turn_s)
    points = []
    for name, compiled in built.items():
        say(f"asking {name}")
        tower = runner(compiled)
        answers = answer(
            lambda entry, inputs, tower=tower: (tower if entry == "vision" else whole)(entry, inputs),  # type: ignore[misc]
            asked,
        )
        error = entry_errors(tower, shapes3.reference.run, [("vision", image) for image in images])["vision"]
        points.append(Point(name, wall[name], cpu[name], kernels(compiled, "vision"), samples, answers.right, error))
    return points


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one is better than in one figure and at least as good in the other."""

    def beats(a: Point, b: Point) -> bool:
        at_least = a.wall_us <= b.wall_us and a.accuracy >= b.accuracy
        return at_least and (a.wall_us < b.wall_us or a.accuracy > b.accuracy)

    return [p for p in points if not any(beats(other, p) for other in points)]


def shortfalls(points: Sequence[Point], reference_right: int) -> list[str]:
    """Return what falls short of what ``--check`` asks."""
    out = []
    for point in points:
        if point.right != reference_right:
            out.append(f"{point.name}: {point.right} of {point.samples} right, the reference has {reference_right}")
        if not point.error <= MOST_ERROR:
            out.append(f"{point.name}: error {point.error:.3g}, allowed {MOST_ERROR:g}")
    first, last = points[0], points[-1]
    # On a busy machine the wall time of what waits for a core grows: slower is what is so in both times.
    share = min(last.wall_us / first.wall_us, last.cpu_us / first.cpu_us)
    if share > SLOWEST:
        out.append(f"{last.name}: {share:.2f} times the time of {first.name}, allowed {SLOWEST:g}")
    return out


def plot(points: Sequence[Point], path: Path) -> None:
    """Draw latency against accuracy, the Pareto front as a line.

    Parameters
    ----------
    points : sequence of Point
    path : Path
        ``.svg`` or ``.png``.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    best = sorted(front(points), key=lambda p: p.wall_us)
    axes.plot([p.wall_us / 1000 for p in best], [100 * p.accuracy for p in best], color="0.6", zorder=1)
    for i, point in enumerate(points):
        where = (point.wall_us / 1000, 100 * point.accuracy)
        axes.plot(*where, "o", color="C0", fillstyle="full" if point in best else "none")
        axes.annotate(point.name, where, textcoords="offset points", xytext=(6, 8 + 12 * i))
    axes.set_xlabel("one image, this machine (ms)")
    axes.set_ylabel(f"right answers of {points[0].samples} (%)")
    axes.set_title("shapes3: vision tower by what is fused (filled: Pareto front)")
    axes.margins(x=0.3)
    lowest = 100 * min(p.accuracy for p in points)
    axes.set_ylim(max(0.0, lowest - 5), min(102.0, lowest + 5))
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Print the table; see the module's docstring."""
    parser = command.parser(__doc__)
    parser.add_argument("--samples", type=int, default=100, help="held-out questions")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.svg or .png; needs matplotlib)")
    args = parser.parse_args()
    if args.samples < 1 or args.turns < 1:
        parser.error("--samples and --turns must be at least 1")
    if args.plot is not None:
        if args.plot.suffix not in _SUFFIXES:
            parser.error(f"--plot: {args.plot.name} ends in none of {', '.join(_SUFFIXES)}")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib: pip install 'crossloom[all]'")
    points = measure(args.samples, args.turns, 0.05, lambda text: print(f"{text} ...", file=sys.stderr, flush=True))
    best = front(points)
    print(f"{'variant':22s}{'us':>10s}{'cpu us':>10s}{'x ViT':>8s}{'kernels':>9s}{'right':>11s}{'error':>11s}  front")
    for p in points:
        cells = f"{p.wall_us:10.1f}{p.cpu_us:10.1f}{points[0].wall_us / p.wall_us:8.2f}{p.kernels:9d}"
        score = f"{p.right}/{p.samples}"
        print(f"{p.name:22s}{cells}{score:>11s}{p.error:11.2e}  {'yes' if p in best else 'no'}")
    if args.plot:
        plot(points, args.plot)
    rows = [{**asdict(p), "accuracy": p.accuracy, "front": p in best} for p in points]

    def missing() -> list[str]:
        return shortfalls(points, answer(shapes3.reference.run, shapes3.held_out(args.samples)).right)

    return command.finish(args, rows, missing)


if __name__ == "__main__":
    sys.exit(main())
