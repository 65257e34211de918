"""Damaged ONNX models: the importer imports them or raises a CrossloomError; it never crashes, hangs or leaks."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import traceback

import numpy as np
import pytest
from onnx import ModelProto
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

MUTATIONS = 520
CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES = 10, 60, 4 << 30
EXTREMES = (0, 1, -1, 2, 3, 7, 255, -128, 1 << 20, 1 << 31, -(1 << 31), 1 << 47, (1 << 63) - 1, -(1 << 63))


def seeds() -> list[bytes]:
    """Three small models: shape arithmetic, quantized weights, control flow and convolution."""
    vi = h.make_tensor_value_info
    make = h.make_node
    int64 = lambda name, *v: nh.from_array(np.array(v, "int64"), name)
    shapes = [
        make("Shape", ["x"], ["s"]),
        make("Gather", ["s", "zero"], ["n"]),
        make("Concat", ["n", "minus", "two"], ["target"], axis=0),
        make("Reshape", ["x", "target"], ["r"]),
        make("Slice", ["r", "zero", "n", "two"], ["c"]),
        make("MatMul", ["c", "w"], ["m"]),
        make("Softmax", ["m"], ["y"], axis=-1),
    ]
    weights = [int64("zero", 0), int64("minus", -1), int64("two", 2), nh.from_array(np.ones((2, 3), "float32"), "w")]
    first = h.make_graph(shapes, "shapes", [vi("x", T.FLOAT, ["n", 4])], [vi("y", T.FLOAT, None)], weights)
    quantized = [
        make("DequantizeLinear", ["q", "scale", "point"], ["w"], axis=0),
        make("MatMulNBits", ["x", "B", "S"], ["m"], domain="com.microsoft", K=16, N=4, bits=4, block_size=16),
        make("MatMul", ["m", "w"], ["y"]),
    ]
    weights = [
        nh.from_array(np.arange(20, dtype="int8").reshape(4, 5), "q"),
        nh.from_array(np.full(4, 0.5, "float32"), "scale"),
        nh.from_array(np.zeros(4, "int8"), "point"),
        nh.from_array(np.arange(32, dtype="uint8").reshape(4, 1, 8), "B"),
        nh.from_array(np.ones(4, "float32"), "S"),
    ]
    second = h.make_graph(quantized, "quantized", [vi("x", T.FLOAT, ["n", 16])], [vi("y", T.FLOAT, ["n", 5])], weights)
    branch = lambda name, op: h.make_graph([make(op, ["v"], [name])], name, [], [vi(name, T.FLOAT, None)])
    control = [
        make("Conv", ["x", "k", "b"], ["v"], pads=[1, 1, 1, 1], strides=[2, 2], kernel_shape=[3, 3]),
        make("If", ["flag"], ["u"], then_branch=branch("p", "Relu"), else_branch=branch("o", "Neg")),
        make("GlobalAveragePool", ["u"], ["g"]),
        make("Flatten", ["g"], ["y"]),
    ]
    weights = [nh.from_array(np.ones((2, 3, 3, 3), "float32"), "k"), nh.from_array(np.ones(2, "float32"), "b")]
    inputs = [vi("x", T.FLOAT, [1, 3, 8, 8]), vi("flag", T.BOOL, [])]
    third = h.make_graph(control, "control", inputs, [vi("y", T.FLOAT, None)], weights)
    sets = [h.make_opsetid("", 17), h.make_opsetid("com.microsoft", 1)]
    graphs = (first, second, third)
    return [h.make_model(g, opset_imports=sets, ir_version=8).SerializeToString() for g in graphs]


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Damage one or two places, in the bytes or in the parsed model."""
    for _ in range(1 + int(rng.random() < 0.3)):
        data = _bytes(bytearray(data), rng) if rng.random() < 0.2 else _structure(data, rng)
    return data


def _bytes(data: bytearray, rng: np.random.Generator) -> bytes:
    if len(data) < 4:
        return bytes(data)
    at, size = int(rng.integers(len(data))), int(rng.integers(1, 9))
    kind = int(rng.integers(4))
    if kind == 0:
        data[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del data[at : at + size]
    elif kind == 2:
        data[at:at] = rng.bytes(size)
    else:
        del data[at:]
    return bytes(data)


def _structure(data: bytes, rng: np.random.Generator) -> bytes:
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        return data
    graph = model.graph
    pick = lambda items: items[int(rng.integers(len(items)))] if len(items) else None
    node, tensor = pick(graph.node), pick(graph.initializer)
    value = pick([*graph.input, *graph.output])
    names = [n for k in graph.node for n in (*k.input, *k.output)] or ["x"]
    extreme = int(rng.choice(np.array(EXTREMES, dtype=object)))
    kind = int(rng.integers(10))
    if kind == 0 and node is not None and len(node.input):
        node.input[int(rng.integers(len(node.input)))] = pick(names)
    elif kind == 1 and node is not None and len(node.output):
        node.output[0] = pick(names)
    elif kind == 2 and node is not None:
        node.op_type = pick(["Shape", "Expand", "Range", "Slice", "Concat", "Loop", "Add", "Tile", "Squeeze", "TopK"])
    elif kind == 3 and tensor is not None:
        tensor.data_type = int(rng.integers(0, 26))
    elif kind == 4 and tensor is not None and len(tensor.dims):
        tensor.dims[int(rng.integers(len(tensor.dims)))] = extreme
    elif kind == 5 and value is not None and value.type.tensor_type.shape.dim:
        pick(value.type.tensor_type.shape.dim).dim_value = extreme
    elif kind == 6 and node is not None and node.attribute:
        attribute = pick(node.attribute)
        if attribute.ints:
            attribute.ints[int(rng.integers(len(attribute.ints)))] = extreme
        else:
            attribute.i = extreme
    elif kind == 7 and tensor is not None and tensor.data_type == T.INT64 and len(tensor.raw_data) % 8 == 0:
        tensor.raw_data = np.full(len(tensor.raw_data) // 8, extreme, "int64").tobytes()
    elif kind == 8 and node is not None:
        graph.node.append(node)
    elif node is not None:
        graph.node.remove(node)
    return model.SerializeToString()


def _one(data: bytes, report: int) -> int:
    """Import in this forked process; write what went wrong to `report`; return the exit code."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.alarm(WALL_SECONDS)
    from crossloom.errors import CrossloomError
    from crossloom.importers.onnx import from_onnx

    try:
        from_onnx(data)
    except CrossloomError as err:
        return 1 if len(str(err)) > 10 else 3
    except BaseException:
        os.write(report, traceback.format_exc()[-1500:].encode())
        return 3
    return 0


def worker() -> None:
    """Import the importer once, then fork for every mutation; print one line for each that went wrong."""
    import crossloom.importers.onnx  # noqa: F401

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    originals, counts = seeds(), {0: 0, 1: 0}
    for index in range(-len(originals), MUTATIONS):
        # Below 0: the undamaged models, which the limits must leave alone.
        data = originals[index] if index < 0 else mutate(originals[index % 3], np.random.default_rng(index))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            code = 3
            try:
                code = _one(data, write)
            finally:
                os._exit(code)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            text = pipe.read().decode(errors="replace")
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if index < 0:
            if status != 0:
                print(f"BAD undamaged model {index}: exit {status}")
        elif status in counts:
            counts[status] += 1
        else:
            print(f"BAD mutation {index}: exit {status} (negative: signal)\n{text}")
    print(f"DONE imported={counts[0]} refused={counts[1]}")


def test_seeds_import():
    from crossloom.importers.onnx import from_onnx

    for data in seeds():
        assert from_onnx(data).entries["main"].outputs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process for every mutation")
def test_damaged_models_are_imported_or_refused():
    result = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "BAD" not in result.stdout, result.stdout[:6000]
    counts = dict(part.split("=") for part in result.stdout.split("DONE ")[1].split())
    # Both paths were walked; a mutator that damages nothing, or everything at the first byte, proves little.
    assert int(counts["imported"]) > 15 and int(counts["refused"]) > 200
    assert int(counts["imported"]) + int(counts["refused"]) == MUTATIONS


if __name__ == "__main__":
    worker()
