"""Sequences and gates of several modalities, with and without their passes: ``python -m benchmarks.cross_modal``.

Both are compiled by our pipeline for this machine and timed in turns within one run; a figure is the fastest of the
turns, wall and processor time of one call, beside the kernels and the bytes that they write.

``--check`` asks that the passes make nothing slower (processor time); results that differ by over 1e-5 end it anyhow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from benchmarks import command
from benchmarks.timing import call_of, take_turns
from crossloom.driver import compile_model
from crossloom.importers.signature import tensor_spec
from crossloom.model import Entry, Model
from crossloom.targets import get_target

PASSES = ("fuse-cross-modal-embedding", "fuse-semantic-gate", "lower-fused-sequence", "lower-fused-gate")
TURNS, TURN_S = 9, 0.01
#: Slower by more than turns of one kernel differ; and results that agree.
NOISE, SAME = 1.03, 1e-5

op = relax.op
#: Emits an expression and returns the variable.
Emit = Callable[[relax.Expr], relax.Var]


@dataclass(frozen=True)
class Workload:
    """A function of arrays, the last ``weights`` of which are weights."""

    name: str
    build: Callable[..., relax.Expr]
    arrays: tuple[np.ndarray, ...]
    weights: int

    def model(self) -> Model:
        """Return it as a model of one entry."""
        params = [relax.Var(f"x{i}", relax.TensorType(a.shape, str(a.dtype))) for i, a in enumerate(self.arrays)]
        count = len(params) - self.weights
        builder = relax.BlockBuilder()
        with builder.function("main", params, attrs={"num_input": count}):
            with builder.dataflow():
                out = builder.emit_output(self.build(builder.emit, *params))
            builder.emit_func_output(out)
        mod = builder.get()
        names = tuple(f"w{i}" for i in range(self.weights))
        inputs = tuple(tensor_spec(p.name, p.ty) for p in params[:count])
        entry = Entry("main", inputs, (tensor_spec("y", mod["main"].ret_ty),), names)
        return Model(mod, dict(zip(names, self.arrays[count:])), {"main": entry})


def _embed(e: Emit, image: relax.Var, audio: relax.Var, ids: relax.Var, table: relax.Var) -> relax.Expr:
    return op.concat([image, audio, e(op.take(table, ids, 0, mode="clip"))], 1)


def _projected(e: Emit, image: relax.Var, ids: relax.Var, w: relax.Var, b: relax.Var, table: relax.Var) -> relax.Expr:
    made = e(op.add(e(op.matmul(image, w)), b))
    return op.concat([made, e(op.take(table, ids, 0, mode="clip"))], 1)


def _scattered(e: Emit, image: relax.Var, ids: relax.Var, w: relax.Var, b: relax.Var, table: relax.Var) -> relax.Expr:
    made = e(op.add(e(op.matmul(image, w)), b))
    mask = e(op.equal(ids, relax.const(3, "int64")))
    number = e(op.subtract(e(op.cumsum(e(op.astype(mask, "int64")), axis=1)), relax.const(1, "int64")))
    rows, width = int(image.ty.shape[1]), int(w.ty.shape[1])
    taken = e(op.take(e(op.reshape(made, [rows, width])), number, 0, mode="clip"))
    return op.where(e(op.expand_dims(mask, [-1])), taken, e(op.take(table, ids, 0, mode="clip")))


def _gate(e: Emit, a: relax.Var, b: relax.Var) -> relax.Expr:
    def unit(x: relax.Var) -> relax.Var:
        length = e(op.sqrt(e(op.sum(e(op.multiply(x, x)), [-1], True))))
        return e(op.divide(x, e(op.maximum(length, relax.const(1e-8)))))

    gate = e(op.sigmoid(e(op.sum(e(op.multiply(unit(a), unit(b))), [-1], True))))
    return op.add(e(op.multiply(gate, a)), e(op.multiply(e(op.subtract(relax.const(1.0), gate)), b)))


def workloads() -> list[Workload]:
    """Return what is measured: shapes3's embedding, LLaVA's joined and by placeholder, gates."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype("float32")

    ids = rng.integers(10, 4000, (1, 640))
    ids[0, 30:606] = 3
    projector = floats(1024, 2048), floats(2048), floats(4000, 2048)
    image = floats(1, 576, 1024)
    embed = floats(1, 36, 128), floats(1, 64, 128), rng.integers(0, 32, (1, 20)), floats(32, 128)
    return [
        Workload("shapes3 embed", _embed, embed, 1),
        Workload("LLaVA joined", _projected, (image, ids[:, :64], *projector), 3),
        Workload("LLaVA by placeholder", _scattered, (image, ids, *projector), 3),
        Workload("gate 64 x 512", _gate, (floats(64, 512), floats(64, 512)), 0),
        Workload("gate over a pooled vector", _gate, (floats(64, 512), floats(1, 512)), 0),
    ]


def _written(mod: tvm.ir.IRModule) -> tuple[int, int]:
    """Return the number of kernels and the bytes that they write."""
    kernels = total = 0
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.call_tir":
                kernels += 1
                ty = binding.var.ty
                for one in ty.fields if isinstance(ty, relax.TupleType) else [ty]:
                    sizes = [int(d) for d in one.shape if isinstance(d, tirx.IntImm)]
                    total += int(np.prod(sizes)) * tvm.DataType(str(one.dtype)).bits // 8
    return kernels, total


def _callable(workload: Workload, disabled: Sequence[str]) -> tuple[Callable[[], Any], tuple[int, int]]:
    compiled = compile_model(workload.model(), get_target("host"), disabled=disabled)
    given = workload.arrays[: len(workload.arrays) - workload.weights]
    call = call_of(compiled.executable, "main", [*given, *compiled.model.entry_params("main")])
    return call, _written(compiled.model.mod)


@dataclass(frozen=True)
class Row:
    """A workload's figures, each without the passes and with them, and the difference of the results."""

    name: str
    wall_us: tuple[float, float]
    cpu_us: tuple[float, float]
    kernels: tuple[int, int]
    written_bytes: tuple[int, int]
    difference: float

    @property
    def gain(self) -> float:
        """How many times as fast the passes make it."""
        return self.cpu_us[0] / self.cpu_us[1]


def measure(workload: Workload) -> Row:
    """Compile a workload both ways and time it."""
    built = {how: _callable(workload, disabled) for how, disabled in (("without", PASSES), ("with", ()))}
    runs = {how: run for how, (run, _) in built.items()}
    before, after = (run().numpy() for run in runs.values())
    wall, cpu = take_turns(runs, TURNS, TURN_S)
    kernels, written = zip(*(figures for _, figures in built.values()))
    difference = float(np.abs(before - after).max() / np.abs(before).max())
    if not difference <= SAME:
        raise SystemExit(f"{workload.name}: results differ by {difference:.2g}")
    return Row(workload.name, tuple(wall.values()), tuple(cpu.values()), kernels, written, difference)  # type: ignore[arg-type]


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """Return what falls short."""
    slower = [row for row in rows if row.gain * NOISE < 1]
    return [f"{row.name}: {1 / row.gain:.2f} times the processor time, allowed {NOISE:g}" for row in slower]


def main() -> int:
    """Print the table; see the module's docstring."""
    args = command.parser(__doc__).parse_args()
    print(f"{'':26} {'wall us':>19} {'cpu us':>19} {'kernels':>9} {'bytes written':>19}  gain")
    rows = []
    for row in map(measure, workloads()):
        rows.append(row)
        times = " ".join(f"{t:9.1f}" for t in (*row.wall_us, *row.cpu_us))
        counts = "{:4} {:4} {:9} {:9}".format(*row.kernels, *row.written_bytes)
        print(f"{row.name:26} {times} {counts}  {row.gain:.2f}", flush=True)
    return command.finish(args, [asdict(row) for row in rows], lambda: shortfalls(rows))


if __name__ == "__main__":
    sys.exit(main())
