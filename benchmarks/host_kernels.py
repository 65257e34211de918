"""Kernels on this machine, ours against TVM's default and numpy, side by side: ``python -m benchmarks.host_kernels``.

Each kernel is a Relax function compiled twice for the host: by our pipeline, and by ``tvm.compile`` alone, which on a
CPU neither fuses nor schedules.  Both, and numpy where it has such a function, are timed in turns within one run, so
that what else the machine does falls on all alike; a figure is the fastest of the turns, wall time of one call, and
beside it the processor time of all threads.  Convolutions with bias and activation are held against our own pipeline
without their kernel, ``default`` in those rows, and against a product of as many factors in numpy.  Feed-forward
blocks are measured as one kernel and as two, whose figures stand under ``default``.  The last rows are the entries of
shapes3 as they are shipped.

``--check`` asks that no kernel is slower than 0.9 times TVM's default and no block than 0.9 times two kernels, no
convolution than 0.97 times the pipeline without it and all of them together (geometric mean) 1.3 times as fast, that a
512 x 512 x 512 product is at least 20 times as fast as it, and that shapes3's prefill is faster than its numpy
reference in wall and in processor time.  A kernel is slower only where it is so in both times: on a busy machine the
wall time of what waits for two cores grows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from benchmarks import command, feed_forward
from benchmarks.timing import call_of, take_turns
from crossloom import flow
from crossloom.driver import compile_model
from crossloom.importers.load import load_model
from crossloom.models import shapes3
from crossloom.models.shapes3.greedy import causal_mask
from crossloom.targets import get_target

SLOWEST, PRODUCT = 0.9, 20.0
SLOWEST_CONV, CONVS = 0.97, 1.3
#: Turns, and the least time of one turn (seconds).
TURNS, TURN_S = 9, 0.01

op = relax.op


@dataclass(frozen=True)
class Kernel:
    """What is measured.

    Attributes
    ----------
    name : str
    build : callable
        Relax operands to a Relax expression.
    shapes : tuple
        Of the operands; a string is a symbolic dimension.
    numpy : callable or None
        The same in numpy.
    sizes : mapping of str to int
        Values of the symbolic dimensions.
    integers : int
        The last operand holds indices below this; 0 when all operands are float32.
    weights : tuple of int
        Operands that are known when a model is built.
    without : tuple of str
        Passes left out of our pipeline in what it is held against; none: TVM's default.
    """

    name: str
    build: Callable[..., relax.Expr]
    shapes: tuple[tuple[int | str, ...], ...]
    numpy: Callable[..., Any] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    integers: int = 0
    weights: tuple[int, ...] = ()
    without: tuple[str, ...] = ()

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """Draw the operands."""
        rng = np.random.default_rng(seed)
        shapes = [tuple(self.sizes[d] if isinstance(d, str) else d for d in shape) for shape in self.shapes]
        out = [rng.standard_normal(shape).astype("float32") for shape in shapes]
        if self.integers:
            out[-1] = rng.integers(0, self.integers, shapes[-1])
        return out

    def module(self) -> tvm.ir.IRModule:
        """Return the kernel as a module of one function."""
        dims: dict[str, tirx.Var] = {}
        params: dict[int, relax.Var] = {}
        for i, shape in enumerate(self.shapes):
            dtype = "int64" if self.integers and i == len(self.shapes) - 1 else "float32"
            bound = [dims.setdefault(d, tirx.Var(d, "int64")) if isinstance(d, str) else d for d in shape]
            params[i] = relax.Var(f"x{i}", relax.TensorType(bound, dtype))
        arrays, builder = self.arrays(), relax.BlockBuilder()
        operands = [relax.const(arrays[i]) if i in self.weights else param for i, param in params.items()]
        with builder.function("main", [param for i, param in params.items() if i not in self.weights]):
            with builder.dataflow():
                out = builder.emit_output(self.build(*operands))
            builder.emit_func_output(out)
        return builder.get()


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _layer_norm(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b


def _rms_norm(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _transposed_product(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return op.matmul(x, op.permute_dims(w))


def _conv(groups: int) -> Callable[..., relax.Expr]:
    return lambda x, w: op.nn.conv2d(x, w, padding=1, groups=groups)


def _fused_conv(
    name: str,
    size: tuple[int, ...],
    channels: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    *,
    groups: int = 1,
    activation: Callable[..., relax.Expr] = op.nn.relu,
    residual: bool = False,
) -> Kernel:
    """Return a convolution with a bias and an activation, padded so that a stride of 1 keeps the size."""
    rank, convolution = len(size), {1: op.nn.conv1d, 2: op.nn.conv2d}[len(size)]
    result = [(extent - 1) // stride + 1 for extent in size]
    depth, places = channels // groups * kernel**rank, math.prod(result)

    def build(x: relax.Expr, w: relax.Expr, b: relax.Expr, *r: relax.Expr) -> relax.Expr:
        y = op.add(convolution(x, w, strides=stride, padding=kernel // 2, groups=groups), b)
        return activation(op.add(y, r[0]) if r else y)

    def product(x: np.ndarray, w: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        return w.reshape(outputs, depth) @ _columns(depth, places)

    shapes: tuple[tuple[int | str, ...], ...]
    shapes = ((1, channels, *size), (outputs, channels // groups, *(kernel,) * rank), (1, outputs, *(1,) * rank))
    shapes += ((1, outputs, *result),) if residual else ()
    numpy = product if groups == 1 else None
    return Kernel(f"conv: {name}", build, shapes, numpy, weights=(1, 2), without=("fuse-conv-epilogue",))


@lru_cache(maxsize=1)
def _columns(depth: int, places: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((depth, places)).astype("float32")


def _transpose(name: str, axes: tuple[int, ...], shape: tuple[int, ...]) -> Kernel:
    def numpy(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.transpose(axes))

    return Kernel(name, lambda x: op.permute_dims(x, axes), (shape,), numpy)


def _sum(name: str, axis: int) -> Kernel:
    return Kernel(name, lambda x: op.sum(x, axis), ((64, 48, 96),), lambda x: x.sum(axis))


_DIM, _MLP, _HEADS, _HEAD = shapes3.CONFIG.dim, shapes3.CONFIG.mlp_dim, shapes3.CONFIG.heads, shapes3.CONFIG.head_dim
_T = {"T": 60}

CONVOLUTIONS: tuple[Kernel, ...] = (
    _fused_conv("resnet 3x3", (56, 56), 64, 64, 3, residual=True),
    _fused_conv("resnet 3x3 s2", (56, 56), 64, 128, 3, 2),
    _fused_conv("resnet 3x3 7", (7, 7), 512, 512, 3),
    _fused_conv("resnet stem 7x7 s2", (224, 224), 3, 64, 7, 2),
    _fused_conv("resnet 1x1 14", (14, 14), 256, 1024, 1, residual=True),
    _fused_conv("resnet 1x1 56", (56, 56), 64, 256, 1),
    _fused_conv("resnet 1x1 s2", (56, 56), 256, 512, 1, 2),
    _fused_conv("mobilenet 3x3", (112, 112), 32, 32, 3, groups=32),
    _fused_conv("mobilenet 3x3 s2", (112, 112), 96, 96, 3, 2, groups=96),
    _fused_conv("mobilenet 3x3 14", (14, 14), 384, 384, 3, groups=384),
    _fused_conv("mobilenet 3x3 7", (7, 7), 960, 960, 3, groups=960),
    _fused_conv("whisper k3", (3000,), 80, 384, 3, activation=op.nn.gelu),
    _fused_conv("whisper k3 s2", (3000,), 384, 384, 3, 2, activation=op.nn.gelu),
    _fused_conv("shapes3 k3", (64,), shapes3.CONFIG.n_mels, _DIM, 3, activation=op.nn.gelu),
    _fused_conv("shapes3 k3 s2", (64,), _DIM, _DIM, 3, 2, activation=op.nn.gelu),
)

KERNELS: tuple[Kernel, ...] = (
    Kernel("matmul 512", op.matmul, ((512, 512), (512, 512)), np.matmul),
    Kernel("matmul 512, transposed", _transposed_product, ((512, 512), (512, 512)), lambda x, w: x @ w.T),
    Kernel("matmul ragged 257", op.matmul, ((257, 129), (129, 131)), np.matmul),
    Kernel("matmul ragged tiny", op.matmul, ((17, 31), (31, 97)), np.matmul),
    Kernel("matmul tiny 8", op.matmul, ((8, 8), (8, 8)), np.matmul),
    Kernel("matmul dynamic rows", op.matmul, (("T", 128), (128, 384)), np.matmul, _T),
    Kernel("gemv 1024", op.matmul, ((1, 1024), (1024, 1024)), np.matmul),
    Kernel("gemv transposed", _transposed_product, ((1, 1024), (1024, 1024)), lambda x, w: x @ w.T),
    Kernel("matmul batched small", op.matmul, ((16, 24, 20), (16, 20, 24)), np.matmul),
    Kernel("matmul batched 64", op.matmul, ((8, 64, 64), (8, 64, 64)), np.matmul),
    Kernel("conv2d 3x3", _conv(1), ((1, 32, 28, 28), (32, 32, 3, 3))),
    Kernel("conv2d 3x3 ragged", _conv(1), ((1, 3, 47, 45), (7, 3, 3, 3))),
    Kernel("depthwise 3x3", _conv(64), ((1, 64, 28, 28), (64, 1, 3, 3))),
    Kernel("softmax", lambda x: op.nn.softmax(x, -1), ((64, 512),), _softmax),
    Kernel("softmax ragged", lambda x: op.nn.softmax(x, -1), ((30, 77),), _softmax),
    Kernel("softmax dynamic", lambda x: op.nn.softmax(x, -1), ((4, "T", "T"),), _softmax, _T),
    Kernel("layer norm", lambda x, g, b: op.nn.layer_norm(x, g, b, [-1]), ((64, 768), (768,), (768,)), _layer_norm),
    Kernel("rms norm", lambda x, g: op.nn.rms_norm(x, g, [-1], 1e-5), ((64, 768), (768,)), _rms_norm),
    Kernel(
        "elementwise chain",
        lambda x, y, z: op.nn.relu(op.subtract(op.multiply(op.add(x, y), z), x)),
        ((256, 1024),) * 3,
        lambda x, y, z: np.maximum((x + y) * z - x, 0),
    ),
    Kernel("gelu", op.nn.gelu, ((64, 768),)),
    Kernel("silu", op.nn.silu, ((64, 768),), _silu),
    Kernel("exp", op.exp, ((64, 768),), np.exp),
    Kernel("tanh", op.tanh, ((64, 768),), np.tanh),
    _transpose("transpose 512", (1, 0), (512, 512)),
    _transpose("transpose batched", (0, 2, 1), (8, 96, 80)),
    _transpose("transpose heads", (0, 2, 1, 3), (1, 128, 8, 64)),
    _transpose("transpose ragged", (1, 0), (301, 277)),
    _sum("sum first", 0),
    _sum("sum middle", 1),
    _sum("sum last", 2),
    Kernel("gather", lambda x, i: op.take(x, i, 0), ((1000, 64), (128,)), lambda x, i: x[i], integers=1000),
    Kernel("shapes3 norm", lambda x, g: op.nn.rms_norm(x, g, [-1], 1e-6), ((1, "T", _DIM), (_DIM,)), _rms_norm, _T),
    Kernel("shapes3 linear", op.matmul, ((1, "T", _DIM), (_DIM, _MLP)), np.matmul, _T),
    Kernel(
        "shapes3 scores",
        lambda q, k: op.matmul(q, op.permute_dims(k, (0, 1, 3, 2))),
        ((1, _HEADS, "T", _HEAD),) * 2,
        lambda q, k: q @ k.transpose(0, 1, 3, 2),
        _T,
    ),
    Kernel("shapes3 mix", op.matmul, ((1, _HEADS, "T", "T"), (1, _HEADS, "T", _HEAD)), np.matmul, _T),
    Kernel("shapes3 gate", lambda x, y: op.multiply(op.nn.silu(x), y), ((1, "T", _MLP),) * 2, None, _T),
    Kernel("shapes3 residual", op.add, ((1, "T", _DIM),) * 2, np.add, _T),
    Kernel("tiny add", op.add, ((8,), (8,)), np.add),
    *CONVOLUTIONS,
)


#: What a row is held against: whether it is a convolution.
_OTHER = {False: "TVM's default", True: "the pipeline without its kernel"}


@dataclass(frozen=True)
class Row:
    """One kernel's wall and processor time of one call, by who ran it: ``ours``, ``default``, ``numpy``, ``two``."""

    name: str
    wall_us: Mapping[str, float]
    cpu_us: Mapping[str, float]

    def gain(self, other: str) -> float:
        """Return how many times as fast ours is in wall time; nan where the other has no figure."""
        return self.wall_us.get(other, float("nan")) / self.wall_us["ours"]

    def cpu_gain(self, other: str) -> float:
        """Return how many times less processor time ours takes; nan where the other has no figure."""
        return self.cpu_us.get(other, float("nan")) / self.cpu_us["ours"]


def measure_kernel(kernel: Kernel, turns: int = TURNS, turn_s: float = TURN_S) -> Row:
    """Compile one kernel both ways and time it."""
    target = get_target("host").tvm_target()
    arrays = kernel.arrays()

    def compiled(**pipeline: Any) -> Callable[[], Any]:
        given = [array for i, array in enumerate(arrays) if i not in kernel.weights]
        return call_of(tvm.compile(kernel.module(), target, **pipeline), "main", given)

    runs = {
        "ours": compiled(relax_pipeline=flow.pipeline(target)),
        "default": compiled(
            **({"relax_pipeline": flow.pipeline(target, None, kernel.without)} if kernel.without else {})
        ),
    }
    if kernel.numpy is not None:
        runs["numpy"] = lambda: kernel.numpy(*arrays)  # type: ignore[misc]
    return Row(kernel.name, *take_turns(runs, turns, turn_s))


def model_inputs(length: int = 60) -> dict[str, dict[str, np.ndarray]]:
    """Return inputs of shapes3's entries by name; ``length`` tokens in prefill, and before the one of decode."""
    config, rng = shapes3.CONFIG, np.random.default_rng(0)
    cache = (config.layers, 1, config.kv_heads, length, config.head_dim)
    drawn: dict[str, dict[str, tuple[int, ...]]] = {
        "vision": {"image": (1, config.channels, config.image_size, config.image_size)},
        "audio": {"log_mel": (1, config.n_mels, config.frames)},
        "prefill": {"inputs_embeds": (1, length, config.dim)},
        "decode": {"past_key": cache, "past_value": cache},
    }
    out = {
        entry: {name: rng.standard_normal(shape).astype("float32") for name, shape in wanted.items()}
        for entry, wanted in drawn.items()
    }
    out["prefill"] |= {"attention_mask": causal_mask(length), "position_ids": np.arange(length)[None]}
    out["decode"] |= {
        "input_ids": np.array([[3]]),
        "attention_mask": np.zeros((1, 1, 1, length + 1), "float32"),
        "position_ids": np.array([[length]]),
    }
    return out


def measure_model(entries: Sequence[str], turns: int = TURNS, turn_s: float = TURN_S) -> list[Row]:
    """Compile shapes3 both ways and time some of its entries; numpy is the model's own reference."""
    model = load_model(shapes3.path() / "shapes3.toml")
    host = get_target("host")
    ours = compile_model(model, host)
    default = tvm.compile(model.mod, host.tvm_target())
    rows, drawn = [], model_inputs()
    for entry in entries:
        inputs = drawn[entry]
        runs: dict[str, Callable[[], Any]] = {}
        for name, executable, owner in (("ours", ours.executable, ours.model), ("default", default, model)):
            arrays = [inputs[spec.name] for spec in owner.entries[entry].inputs] + owner.entry_params(entry)
            runs[name] = call_of(executable, entry, arrays)
        runs["numpy"] = partial(shapes3.reference.run, entry, inputs)
        rows.append(Row(_row_name(entry), *take_turns(runs, turns, turn_s)))
    return rows


def _row_name(entry: str) -> str:
    return f"shapes3: {entry}"


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """Return what falls short of the figures asked."""
    out = []
    convolutions = {kernel.name for kernel in CONVOLUTIONS}
    gains = [row.cpu_gain("default") for row in rows if row.name in convolutions]
    if gains and (mean := math.exp(sum(map(math.log, gains)) / len(gains))) < CONVS:
        out.append(f"convolutions: {mean:.2f} times the pipeline without their kernel, asked {CONVS:g}")
    for row in rows:
        if max(row.gain("two"), row.cpu_gain("two")) < SLOWEST:
            out.append(f"{row.name}: {row.gain('two'):.2f} times two kernels, asked {SLOWEST:g}")
        gain = max(row.gain("default"), row.cpu_gain("default"))
        asked = SLOWEST_CONV if row.name in convolutions else SLOWEST
        if gain < asked:
            out.append(f"{row.name}: {gain:.2f} times {_OTHER[row.name in convolutions]}, asked {asked:g}")
        if row.name == "matmul 512" and gain < PRODUCT:
            out.append(f"{row.name}: {gain:.1f} times TVM's default, asked {PRODUCT:g}")
        if row.name == _row_name("prefill"):
            for what, figures in (("wall", row.wall_us), ("processor", row.cpu_us)):
                if figures["ours"] >= figures["numpy"]:
                    took = f"{figures['ours'] / 1000:.2f} ms against {figures['numpy'] / 1000:.2f} ms of numpy"
                    out.append(f"{row.name}: {took} in {what} time")
    return out


def main() -> int:
    """Print the table; see the module's docstring."""
    parser = command.parser(__doc__)
    parser.add_argument("--only", default="", help="measure the kernels whose name holds this text")
    args = parser.parse_args()
    heads = ("ours", "default", "numpy", "cpu ours", "cpu default", "cpu numpy", "x default", "x cpu", "x numpy")
    print(f"{'kernel':24s}" + "".join(f"{head:>12s}" for head in heads) + "   microseconds a call")
    rows = []

    def show(row: Row) -> None:
        rows.append(row)
        other = "two" if "two" in row.wall_us else "default"
        figures = [times.get(who) for times in (row.wall_us, row.cpu_us) for who in ("ours", other, "numpy")]
        gains = (row.gain(other), row.cpu_gain(other), row.gain("numpy"))
        cells = "".join(f"{'-' if value is None else format(value, '.1f'):>12s}" for value in figures)
        print(f"{row.name:24s}{cells}" + "".join(f"{gain:12.2f}" for gain in gains), flush=True)

    for kernel in KERNELS:
        if args.only in kernel.name:
            show(measure_kernel(kernel))
    for block in feed_forward.BLOCKS:
        if args.only in block.name:
            show(Row(block.name, *feed_forward.measure(block, TURNS, TURN_S)))
    entries = [entry for entry in model_inputs() if args.only in _row_name(entry)]
    for row in measure_model(entries) if entries else ():
        show(row)
    if not rows:
        parser.error(f"--only {args.only!r}: no kernel has that in its name")
    return command.finish(args, [vars(row) for row in rows], lambda: shortfalls(rows))


if __name__ == "__main__":
    sys.exit(main())
