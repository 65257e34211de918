"""Damaged ONNX models: the importer imports them or raises a CrossloomError; it never crashes, hangs or leaks.

A part of the mutations damages bytes, most are changes after which the model is still a model: those reach past
the parser and ONNX's checker, to the converters.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

MUTATIONS = 1000
CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES = 10, 120, 4 << 30
EXTREMES = (0, 1, -1, 2, 3, 7, 255, -128, 1 << 20, 1 << 31, -(1 << 31), 1 << 47, (1 << 63) - 1, -(1 << 63))
PLACES = ("../w.bin", "/dev/zero", "/etc/passwd", "", "w.bin", "sub/../../w.bin", "C:\\w.bin", "w.bin\0x", "missing")
DIMS = ("n", "n + 1", "0 / 0", "n // (m - m)", "((((((n", "-n", "n * " * 30 + "n", "x" * 4000, "?", " ")
OPERATORS = sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""})
#: What a forked import ends with.
IMPORTED, REFUSED_EARLY, REFUSED_LATE, WRONG = range(4)

vi, make = h.make_tensor_value_info, h.make_node


def weight(name: str, *shape: int) -> T:
    return nh.from_array(np.random.default_rng(len(name)).uniform(-1, 1, shape).astype("float32"), name)


def int64(name: str, *values: int) -> T:
    return nh.from_array(np.array(values, "int64"), name)


def shape_arithmetic() -> onnx.GraphProto:
    nodes = [
        make("Shape", ["x"], ["s"]),
        make("Gather", ["s", "zero"], ["n"]),
        make("Concat", ["n", "minus", "two"], ["target"], axis=0),
        make("Reshape", ["x", "target"], ["r"]),
        make("Slice", ["r", "zero", "n", "two"], ["c"]),
        make("MatMul", ["c", "w"], ["m"]),
        make("Softmax", ["m"], ["y"], axis=-1),
    ]
    init = [int64("zero", 0), int64("minus", -1), int64("two", 2), weight("w", 2, 3)]
    return h.make_graph(nodes, "shapes", [vi("x", T.FLOAT, ["n", 4])], [vi("y", T.FLOAT, None)], init)


def quantized() -> onnx.GraphProto:
    nodes = [
        make("DequantizeLinear", ["q", "scale", "point"], ["w"], axis=0),
        make("MatMulNBits", ["x", "B", "S"], ["m"], domain="com.microsoft", K=16, N=4, bits=4, block_size=16),
        make("MatMul", ["m", "w"], ["y"]),
    ]
    init = [
        nh.from_array(np.arange(20, dtype="int8").reshape(4, 5), "q"),
        nh.from_array(np.full(4, 0.5, "float32"), "scale"),
        nh.from_array(np.zeros(4, "int8"), "point"),
        nh.from_array(np.arange(32, dtype="uint8").reshape(4, 1, 8), "B"),
        nh.from_array(np.ones(4, "float32"), "S"),
    ]
    return h.make_graph(nodes, "quantized", [vi("x", T.FLOAT, ["n", 16])], [vi("y", T.FLOAT, ["n", 5])], init)


def control() -> onnx.GraphProto:
    branch = lambda name, op: h.make_graph([make(op, ["v"], [name])], name, [], [vi(name, T.FLOAT, None)])
    nodes = [
        make("Conv", ["x", "k", "b"], ["v"], pads=[1, 1, 1, 1], strides=[2, 2], kernel_shape=[3, 3]),
        make("If", ["flag"], ["u"], then_branch=branch("p", "Relu"), else_branch=branch("o", "Neg")),
        make("GlobalAveragePool", ["u"], ["g"]),
        make("Flatten", ["g"], ["y"]),
    ]
    inputs = [vi("x", T.FLOAT, [1, 3, 8, 8]), vi("flag", T.BOOL, [])]
    return h.make_graph(nodes, "control", inputs, [vi("y", T.FLOAT, None)], [weight("k", 2, 3, 3, 3), weight("b", 2)])


def decoder() -> onnx.GraphProto:
    names = ["h", "", "", "past_k", "past_v", "lens", "total", "cos", "sin"]
    attrs = {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1, "local_window_size": 4, "softcap": 5.0}
    nodes = [
        make("Gather", ["table", "ids"], ["e"]),
        make("SimplifiedLayerNormalization", ["e", "gamma"], ["a"], axis=-1, epsilon=1e-5),
        make("MatMul", ["a", "wqkv"], ["h"]),
        make("GroupQueryAttention", names, ["o", "k", "v"], domain="com.microsoft", **attrs),
        make("SkipLayerNormalization", ["o", "e", "gamma", "beta"], ["f"], domain="com.microsoft"),
        make("Split", ["f", "halves"], ["g", "u"], axis=-1),
        make("Mul", ["g", "u"], ["p"]),
        make("TopK", ["p", "two"], ["y", "at"], axis=-1),
    ]
    init = [weight("table", 9, 16), weight("gamma", 16), weight("beta", 16), weight("wqkv", 16, 32)]
    init += [weight("cos", 32, 4), weight("sin", 32, 4), int64("halves", 8, 8), int64("two", 2)]
    init.append(nh.from_array(np.array(5, "int32"), "total"))
    past = ["b", 1, "p", 8]
    inputs = [vi("ids", T.INT64, ["b", "s"]), vi("past_k", T.FLOAT, past), vi("past_v", T.FLOAT, past)]
    inputs.append(vi("lens", T.INT32, ["b"]))
    outputs = [vi("y", T.FLOAT, None), vi("k", T.FLOAT, None), vi("v", T.FLOAT, None)]
    return h.make_graph(nodes, "decoder", inputs, outputs, init)


def pixels() -> onnx.GraphProto:
    nodes = [
        make("Pad", ["x", "pads"], ["p"], mode="reflect"),
        make("Resize", ["p", "", "scales"], ["r"], mode="linear"),
        make("BatchNormalization", ["r", "a", "b", "c", "d"], ["n"]),
        make("MaxPool", ["n"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
        make("ReduceMean", ["m"], ["q"], axes=[2], keepdims=0),
        make("Transpose", ["q"], ["t"], perm=[0, 2, 1]),
        make("Einsum", ["t", "w"], ["y"], equation="nij,jk->nik"),
    ]
    init = [int64("pads", 0, 0, 1, 1, 0, 0, 1, 1), nh.from_array(np.array([1, 1, 2, 2], "float32"), "scales")]
    init += [nh.from_array(np.ones(3, "float32"), name) for name in "abcd"] + [weight("w", 3, 2)]
    return h.make_graph(nodes, "pixels", [vi("x", T.FLOAT, ["n", 3, 6, 6])], [vi("y", T.FLOAT, None)], init)


def seeds() -> list[bytes]:
    sets = [h.make_opsetid("", 17), h.make_opsetid("com.microsoft", 1)]
    graphs = (shape_arithmetic(), quantized(), control(), decoder(), pixels())
    return [h.make_model(g, opset_imports=sets, ir_version=8).SerializeToString() for g in graphs]


def mutate(data: bytes, rng: np.random.Generator, in_bytes: bool) -> bytes:
    """Damage one or two places, in the bytes or in the parsed model."""
    for _ in range(1 + int(rng.random() < 0.3)):
        data = _bytes(bytearray(data), rng) if in_bytes else _structure(data, rng)
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
    """Change one thing about a model; what comes out is a model again, if not always a valid one."""
    model = ModelProto()
    model.ParseFromString(data)
    pick = lambda items: items[int(rng.integers(len(items)))] if len(items) else None
    change = (_wiring, _operators, _attributes, _weights, _weights, _values, _model)[int(rng.integers(7))]
    change(model, pick, int(pick(EXTREMES)))
    return model.SerializeToString()


def _wiring(model: ModelProto, pick, extreme: int) -> None:
    """Other operands, swapped operands, cycles, outputs made twice, nodes deleted, repeated or moved."""
    graph = model.graph
    node, other = pick(graph.node), pick(graph.node)
    names = [n for k in graph.node for n in (*k.input, *k.output)] or ["x"]
    if node is None:
        return
    kind = pick(("operand", "swap", "cycle", "twice", "delete", "repeat", "move", "drop", "more", "none"))
    if kind == "operand" and node.input:
        node.input[pick(range(len(node.input)))] = pick(names)
    elif kind == "swap" and len(node.input) > 1:
        node.input[0], node.input[1] = node.input[1], node.input[0]
    elif kind == "cycle" and node.input and node.output:
        graph.node[0].input[0] = pick(graph.node[-1].output)
    elif kind == "twice" and node.output and other.output:
        node.output[0] = other.output[0]
    elif kind == "delete":
        graph.node.remove(node)
    elif kind == "repeat":
        graph.node.append(node)
    elif kind == "move":
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        graph.node.remove(node)
        graph.node.append(copy)
    elif kind == "drop" and node.input:
        del node.input[-1]
    elif kind == "more":
        node.input.append(pick(names))
    elif node.input:
        node.input[pick(range(len(node.input)))] = ""


def _operators(model: ModelProto, pick, extreme: int) -> None:
    """Another operator on the same operands, half the time without its attributes; sometimes another domain."""
    node = pick(model.graph.node)
    if node is None:
        return
    node.op_type = pick(OPERATORS)
    node.domain = pick(("", "", "", "com.microsoft", "ai.onnx", "nobody"))
    if pick((True, False)):
        del node.attribute[:]


def _attributes(model: ModelProto, pick, extreme: int) -> None:
    """Extreme values, another kind of value, an attribute missing or one that nobody knows."""
    node = pick([n for n in model.graph.node if n.attribute] or list(model.graph.node))
    attribute = pick(node.attribute) if node is not None else None
    if attribute is None:
        return
    kind = pick(("value", "value", "one", "type", "missing", "unknown"))
    if kind == "missing":
        node.attribute.remove(attribute)
    elif kind == "unknown":
        node.attribute.append(h.make_attribute("surprise", extreme))
    elif kind == "type":
        value = pick(([extreme], 0.5, "text", b"\xff\xfe", [1.5]))
        attribute.CopyFrom(h.make_attribute(attribute.name, value))
    elif attribute.type == AttributeProto.INTS and attribute.ints:
        attribute.ints[pick(range(len(attribute.ints)))] = extreme
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = pick((0.0, -1.0, 1e38, float("inf"), float("nan")))
    elif attribute.type == AttributeProto.STRING:
        attribute.s = pick((b"", b"edge", b"nope", b"\xff\xfe", b"ij->", b"...,..."))
    else:
        attribute.i = extreme


def _weights(model: ModelProto, pick, extreme: int) -> None:
    """Shapes that do not fit the bytes, other types, values that mean nothing, bytes in files elsewhere."""
    tensor = pick(model.graph.initializer)
    if tensor is None:
        return
    kind = pick(("dim", "type", "fill", "one", "nan", "file", "rank", "short", "name"))
    if kind == "dim" and tensor.dims:
        tensor.dims[pick(range(len(tensor.dims)))] = extreme
    elif kind == "type":
        tensor.data_type = pick(range(27))
    elif kind in ("fill", "one") and tensor.data_type == T.INT64 and len(tensor.raw_data) % 8 == 0:
        values = np.frombuffer(tensor.raw_data, "int64").copy()
        values[slice(None) if kind == "fill" or not len(values) else pick(range(len(values)))] = extreme
        tensor.raw_data = values.tobytes()
    elif kind == "nan" and tensor.data_type == T.FLOAT and len(tensor.raw_data) % 4 == 0:
        values = np.frombuffer(tensor.raw_data, "float32").copy()
        values[:1] = pick((np.nan, np.inf, -np.inf, 1e38))
        tensor.raw_data = values.tobytes()
    elif kind == "file":
        tensor.ClearField("raw_data")
        tensor.data_location = T.EXTERNAL
        tensor.external_data.add(key="location", value=pick(PLACES))
        tensor.external_data.add(key=pick(("offset", "length")), value=pick((str(extreme), "x", "", "0")))
    elif kind == "rank":
        tensor.dims.append(pick((1, 1, extreme)))
    elif kind == "short":
        tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 2]
    else:
        tensor.name = pick(("", "y", "x", "ids", tensor.name + "?"))


def _values(model: ModelProto, pick, extreme: int) -> None:
    """Inputs and outputs of other types, ranks and sizes, with odd names of dimensions."""
    value = pick([*model.graph.input, *model.graph.input, *model.graph.output])
    if value is None:
        return
    tensor = value.type.tensor_type
    kind = pick(("dim", "dim", "symbol", "type", "rank", "unknown", "name", "gone"))
    if kind in ("dim", "symbol") and tensor.shape.dim:
        dim = pick(tensor.shape.dim)
        if kind == "dim":
            dim.dim_value = extreme
        else:
            dim.dim_param = pick(DIMS)
    elif kind == "type":
        tensor.elem_type = pick(range(27))
    elif kind == "rank":
        tensor.shape.dim.add(dim_value=pick((1, 2)))
    elif kind == "unknown":
        tensor.ClearField("shape")
    elif kind == "name":
        value.name = pick(("", "y", "e", "w", value.name + "/"))
    elif value in model.graph.output:
        model.graph.output.remove(value)


def _model(model: ModelProto, pick, extreme: int) -> None:
    """Other operator sets, IR versions and initializers that are also inputs."""
    kind = pick(("opset", "opset", "twice", "ir", "default"))
    if kind == "opset" and model.opset_import:
        model.opset_import[0].version = pick((*range(7, 25), 0, extreme))
    elif kind == "twice":
        model.opset_import.append(h.make_opsetid(pick(("", "ai.onnx", "nobody")), pick((17, 9))))
    elif kind == "ir":
        model.ir_version = pick((0, 1, 3, 4, 10, 99, extreme))
    elif model.graph.initializer:
        tensor = pick(model.graph.initializer)
        model.graph.input.append(vi(tensor.name, tensor.data_type, list(tensor.dims)))


def _one(data: bytes, folder: Path, report: int) -> int:
    """Import in this forked process; write what went wrong to `report`; return the exit code."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.alarm(WALL_SECONDS)
    from crossloom.errors import CrossloomError
    from crossloom.importers import onnx_check
    from crossloom.importers.onnx import from_onnx

    passed = []
    check = onnx_check.check_graph
    onnx_check.check_graph = lambda model: (check(model), passed.append(model))
    path = folder / "model.onnx"
    path.write_bytes(data)
    try:
        from_onnx(path)
    except CrossloomError as err:
        if len(str(err)) <= 10:
            return WRONG
        return REFUSED_LATE if passed else REFUSED_EARLY
    except BaseException:
        os.write(report, traceback.format_exc()[-1500:].encode())
        return WRONG
    return IMPORTED


def worker(folder: Path) -> None:
    """Import the importer once, then fork for every mutation; print one line for each that went wrong."""
    import crossloom.importers.onnx  # noqa: F401

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    (folder / "w.bin").write_bytes(bytes(64))
    originals = seeds()
    counts = {"bytes": [0, 0, 0], "structure": [0, 0, 0]}
    for index in range(-len(originals), MUTATIONS):
        # Below 0: the undamaged models, which the limits must leave alone.
        kind = "bytes" if index % 4 == 0 else "structure"
        rng = np.random.default_rng(index + len(originals))
        data = originals[index] if index < 0 else mutate(originals[index % len(originals)], rng, kind == "bytes")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            code = WRONG
            try:
                code = _one(data, folder, write)
            finally:
                os._exit(code)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            text = pipe.read().decode(errors="replace")
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if index < 0:
            if status != IMPORTED:
                print(f"BAD undamaged model {index}: exit {status}\n{text}")
        elif 0 <= status < WRONG:
            counts[kind][status] += 1
        else:
            print(f"BAD mutation {index}: exit {status} (negative: signal)\n{text}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("DONE", *counts["bytes"], *counts["structure"], round(used.ru_utime + used.ru_stime))


def test_seeds_import():
    from crossloom.importers.onnx import from_onnx

    for data in seeds():
        assert from_onnx(data).entries["main"].outputs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process for every mutation")
def test_damaged_models_are_imported_or_refused(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "BAD" not in result.stdout, result.stdout[:6000]
    numbers = [int(word) for word in result.stdout.split("DONE ")[1].split()]
    in_bytes, structure = numbers[:3], numbers[3:6]
    assert sum(in_bytes) + sum(structure) == MUTATIONS
    # A mutator that damages nothing, or everything so that it never gets past the checker, proves little.
    assert in_bytes[IMPORTED] > 5 and in_bytes[REFUSED_EARLY] > 40, numbers
    assert structure[IMPORTED] + structure[REFUSED_LATE] > sum(structure) / 4, numbers
    assert structure[REFUSED_LATE] > 50 and structure[REFUSED_EARLY] > 100, numbers


if __name__ == "__main__":
    worker(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()))
