"""Sequences and gates of several modalities, with and without their passes: ``python -m benchmarks.cross_modal``.

Both are compiled by our pipeline for this machine and timed in turns within one run; a figure is the fastest of the
turns, wall and processor time of one call, beside the kernels and the bytes that they write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from crossloom.driver import compile_model
from crossloom.importers.signature import tensor_spec
from crossloom.model import Entry, Model
from crossloom.targets import get_target

PASSES = ("fuse-cross-modal-embedding", "fuse-semantic-gate", "lower-fused-sequence", "lower-fused-gate")
TURNS, TURN_S = 9, 0.01

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
    machine = relax.VirtualMachine(compiled.executable, tvm.cpu())
    given = workload.arrays[: len(workload.arrays) - workload.weights]
    args = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in (*given, *compiled.model.entry_params("main"))]
    return (lambda: machine["main"](*args)), _written(compiled.model.mod)


def main() -> None:
    """Print the table."""
    print(f"{'':26} {'wall us':>19} {'cpu us':>19} {'kernels':>9} {'bytes written':>19}  gain")
    for workload in workloads():
        runs = [_callable(workload, disabled) for disabled in (PASSES, ())]
        results = [run().numpy() for run, _ in runs]
        if np.abs(results[0] - results[1]).max() > 1e-5 * np.abs(results[0]).max():
            raise SystemExit(f"{workload.name}: results differ")
        wall, cpu = [np.inf, np.inf], [np.inf, np.inf]
        for _ in range(TURNS):
            for i, (run, _) in enumerate(runs):
                start, used, count = time.perf_counter(), time.process_time(), 0
                while count == 0 or time.perf_counter() - start < TURN_S:
                    run()
                    count += 1
                wall[i] = min(wall[i], (time.perf_counter() - start) / count * 1e6)
                cpu[i] = min(cpu[i], (time.process_time() - used) / count * 1e6)
        (before, bytes_before), (after, bytes_after) = runs[0][1], runs[1][1]
        print(
            f"{workload.name:26} {wall[0]:9.1f} {wall[1]:9.1f} {cpu[0]:9.1f} {cpu[1]:9.1f} {before:4} {after:4}"
            f" {bytes_before:9} {bytes_after:9}  {cpu[0] / cpu[1]:.2f}"
        )


if __name__ == "__main__":
    main()
