"""Time our pipeline with fusion against itself without: same process, in turns, the fastest of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossloom.driver import compile_model
from crossloom.model import Entry, Model, TensorSpec
from crossloom.targets import get_target

from .fusion_count import LENGTH, unfused
from .timing import call_of, take_turns

TURNS, TURN_S = 7, 0.02
#: Slower than this times the other is slower: less than turns of the same kernel differ by.
NOISE = 1.03


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call, and the worst difference of the outputs as a fraction of their largest magnitude."""

    model: str
    entry: str
    unfused_us: float
    fused_us: float
    difference: float

    @property
    def gain(self) -> float:
        """How many times as fast fusion makes it."""
        return self.unfused_us / self.fused_us


def measure(name: str, model: Model, entries: Iterable[str] = ()) -> list[Timing]:
    """Compile a model both ways and time its entries (all, where none are named)."""
    host = get_target("host")
    built = {"fused": compile_model(model, host), "unfused": compile_model(model, host, disabled=unfused())}
    rows = []
    for entry in list(entries) or list(model.entries):
        given = inputs_of(model.entries[entry])
        runs = {
            how: call_of(one.executable, entry, [*given, *one.model.entry_params(entry)]) for how, one in built.items()
        }
        difference = _difference(runs["fused"](), runs["unfused"]())
        wall, _ = take_turns(runs, TURNS, TURN_S)
        rows.append(Timing(name, entry, wall["unfused"], wall["fused"], difference))
    return rows


def inputs_of(entry: Entry, seed: int = 0) -> list[np.ndarray]:
    """Return inputs of an entry: small ids, positions in order, masks that hide nothing, normal values elsewhere."""
    rng = np.random.default_rng(seed)
    return [_array(spec, _shape(spec, entry.upper_bounds), rng) for spec in entry.inputs]


def _shape(spec: TensorSpec, bounds: Mapping[str, int]) -> list[int]:
    known = {name: min(LENGTH, bound) for name, bound in bounds.items()}
    return [d if isinstance(d, int) else _size(d, known) for d in spec.shape]


def _size(text: str, known: Mapping[str, int]) -> int:
    """Return the value of a dimension such as ``P + 1``."""
    names = {word for word in text.replace("+", " ").replace("-", " ").replace("*", " ").split() if word.isidentifier()}
    return int(eval(text, {"__builtins__": {}}, {name: known.get(name, LENGTH) for name in names}))


def _array(spec: TensorSpec, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    if "position" in spec.name:
        return np.broadcast_to(np.arange(shape[-1]), shape).astype(spec.dtype)
    if "mask" in spec.name:
        return np.zeros(shape, spec.dtype)
    if spec.dtype.startswith(("int", "uint")):
        return rng.integers(0, 8, shape).astype(spec.dtype)
    return rng.standard_normal(shape).astype(spec.dtype)


def _difference(ours: Any, theirs: Any) -> float:
    """Return the worst difference of two results, each tensor's by its largest magnitude."""
    pairs = [(ours, theirs)] if hasattr(ours, "numpy") else list(zip(ours, theirs))
    worst = 0.0
    for left, right in pairs:
        a, b = left.numpy().astype("float64"), right.numpy().astype("float64")
        if b.size:
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst


def geometric_mean(rows: Sequence[Timing]) -> float:
    """Return the geometric mean of the gains."""
    return math.exp(sum(math.log(row.gain) for row in rows) / len(rows)) if rows else float("nan")


def shortfalls(rows: Sequence[Timing]) -> list[str]:
    """Return what falls short: an entry that fusion makes slower, or whose numbers it changes."""
    out = []
    for row in rows:
        where = f"{row.model}, {row.entry}"
        if row.fused_us > NOISE * row.unfused_us:
            out.append(f"{where}: fused {row.fused_us:.0f} us, unfused {row.unfused_us:.0f} us")
        if not row.difference <= 1e-3:
            out.append(f"{where}: results differ by {row.difference:.2g} of their largest magnitude")
    return out


__all__ = ["Timing", "geometric_mean", "inputs_of", "measure", "shortfalls"]
