"""Seconds of CPU time per pass at 100, 1,000 and 10,000 bindings: ``python -m benchmarks.passes``.

The module is a chain of the operators transformers are made of (norm, product, bias, activation, residual), with a
symbolic length.  ``--check`` asks that each of our own passes takes under 10 s at 10,000 bindings and that its time
grows at most 20-fold from 1,000 to 10,000 (10 is linear; the rest is noise and allocation).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence

import tvm
from tvm import ir, relax, tirx

from benchmarks import command
from crossloom.flow import steps
from crossloom.registry import passes

SIZES = (100, 1000, 10000)
LIMIT_S, GROWTH = 10.0, 20.0


def chain(bindings: int) -> ir.IRModule:
    """Return a module of one function with about ``bindings`` bindings, a fifth of them matrix products."""
    builder = relax.BlockBuilder()
    length = tirx.Var("T", "int64")
    x = relax.Var("x", relax.TensorType((1, length, 32), "float32"))
    w = relax.Var("w", relax.TensorType((32, 32), "float32"))
    b = relax.Var("b", relax.TensorType((32,), "float32"))
    with builder.function("main", [x, w, b], attrs={"num_input": 1}):
        with builder.dataflow():
            h = x
            for _ in range(bindings // 5):
                y = builder.emit(relax.op.nn.rms_norm(h, b, axes=[-1], epsilon=1e-6))
                y = builder.emit(relax.op.matmul(y, w))
                y = builder.emit(relax.op.add(y, b))
                y = builder.emit(relax.op.nn.silu(y))
                h = builder.emit(relax.op.add(h, y))
            out = builder.emit_output(h)
        builder.emit_func_output(out)
    return builder.get()


def measure(sizes: Sequence[int] = SIZES, wanted: Collection[str] | None = None) -> dict[str, dict[int, float]]:
    """Return CPU seconds by pass and size; each pass runs on what the pipeline gives it.

    Where only some passes are wanted nothing runs behind the last of them.
    """
    target = tvm.target.Target({"kind": "llvm"})
    out: dict[str, dict[int, float]] = {}
    for size in sizes:
        mod = chain(size)
        pipeline = steps(target)
        last = max((i for i, step in enumerate(pipeline) if wanted is None or step.text.name in wanted), default=-1)
        for step in pipeline[: last + 1]:
            start = time.process_time()
            mod = step.run(mod)
            if wanted is None or step.text.name in wanted:
                out.setdefault(str(step.text), {})[size] = time.process_time() - start
    return out


def shortfalls(rows: dict[str, dict[int, float]]) -> list[str]:
    """Return what falls short of the figures asked, for our own passes."""
    out = []
    for name, row in rows.items():
        if name not in passes() or name == "legalize-ops":  # TVM's own work
            continue
        mid, large = row[SIZES[1]], row[SIZES[2]]
        if large > LIMIT_S:
            out.append(f"{name}: {large:.1f} s at {SIZES[2]} bindings, asked {LIMIT_S:g}")
        if large > 0.5 and large > GROWTH * max(mid, 0.005):
            out.append(f"{name}: grows {large / max(mid, 0.005):.0f}-fold from {SIZES[1]} to {SIZES[2]}")
    return out


def main() -> int:
    """Print the table; see the module's docstring."""
    args = command.parser(__doc__).parse_args()
    rows = measure()
    print(f"{'pass':32s}" + "".join(f"{size:>12,d}" for size in SIZES) + "   CPU seconds by bindings")
    for name, row in rows.items():
        print(f"{name:32s}" + "".join(f"{row[size]:12.3f}" for size in SIZES))
    return command.finish(args, rows, lambda: shortfalls(rows))


if __name__ == "__main__":
    sys.exit(main())
