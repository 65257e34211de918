"""What layers compute alike from the same operands the pipeline computes once."""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx

from crossloom.flow import default_text, steps
from crossloom.targets import get_target
from crossloom.testing import run_module

op = relax.op
WIDTH, HEADS, HEAD = 32, 2, 16


def _rotated(emit, q, cos, sin):
    low, high = (emit(op.strided_slice(q, [3], [at], [at + HEAD // 2])) for at in (0, HEAD // 2))
    turned = emit(op.concat([emit(op.negative(high)), low], -1))
    return emit(op.add(emit(op.multiply(q, cos)), emit(op.multiply(turned, sin))))


def decoder(layers):
    """Return layers that each look cos and sin up by the same positions."""
    length = tirx.Var("T", "int64")
    shapes = [("x", (1, length, WIDTH)), ("cos", (64, HEAD)), ("sin", (64, HEAD))]
    shapes += [(f"{kind}{layer}", (WIDTH, WIDTH)) for layer in range(layers) for kind in "qkvo"]
    x, cos, sin, *weights = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes)
    positions = relax.Var("positions", relax.TensorType((length,), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, positions, cos, sin, *weights], attrs={"num_input": 2}):
        with builder.dataflow():
            emit = builder.emit
            for layer in range(layers):
                tables = [emit(op.take(table, positions, axis=0)) for table in (cos, sin)]
                tables = [emit(op.expand_dims(table, (0, 1))) for table in tables]
                q, k, v, o = weights[4 * layer : 4 * layer + 4]
                heads = [emit(op.reshape(emit(op.matmul(x, w)), (1, length, HEADS, HEAD))) for w in (q, k, v)]
                q, k, v = (emit(op.permute_dims(head, (0, 2, 1, 3))) for head in heads)
                q, k = (_rotated(emit, head, *tables) for head in (q, k))
                scores = emit(op.matmul(q, emit(op.permute_dims(k, (0, 1, 3, 2)))))
                mixed = emit(op.matmul(emit(op.nn.softmax(emit(op.multiply(scores, relax.const(0.25))))), v))
                mixed = emit(op.reshape(emit(op.permute_dims(mixed, (0, 2, 1, 3))), (1, length, WIDTH)))
                x = emit(op.add(x, emit(op.matmul(mixed, o))))
            out = builder.emit_output(x)
        builder.emit_func_output(out)
    return builder.get()


def test_tables_are_looked_up_once():
    target = get_target("host").tvm_target()
    mod = decoder(3)
    with target:
        # Without schedules it stays what any target runs.
        for step in steps(target, disabled=["schedule-cpu"]):
            mod = step.run(mod)
    calls = [b.value for block in mod["main"].body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
    kernels = [call for call in calls if call.op.name == "relax.call_tir"]
    lookups = [
        call for call in kernels if any(getattr(arg, "name", "") in ("cos", "sin") for arg in call.args[1].fields)
    ]
    assert len(lookups) == 2
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((1, 5, WIDTH)), rng.integers(0, 64, (5,)), *rng.standard_normal((2, 64, HEAD))]
    values += [rng.standard_normal((WIDTH, WIDTH)) / 8 for _ in range(12)]
    values = [v if v.dtype == "int64" else v.astype("float32") for v in values]
    (got,), (want,) = run_module(mod, "main", values), run_module(decoder(3), "main", values)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_it_is_right_behind_recognition():
    order = default_text().split(",")
    assert order.index("share-equal-bindings") == order.index("canonicalize-transformer") + 1
