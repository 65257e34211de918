"""Feed-forward blocks of models, as one kernel and as two: rows of ``benchmarks.host_kernels``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from benchmarks.timing import call_of, take_turns
from crossloom import flow
from crossloom.models.shapes3 import CONFIG
from crossloom.targets import get_target

op = relax.op


@dataclass(frozen=True)
class Block:
    """A feed-forward block of a model: ``x + down(silu(gate(norm(x))) * up(norm(x)))``, or gelu without a gate."""

    name: str
    rows: int
    depth: int
    hidden: int
    gated: bool = False

    def module(self) -> tvm.ir.IRModule:
        """Return the block, its weights constants."""
        rng = np.random.default_rng(0)

        def weight(*shape: int) -> relax.Expr:
            return relax.const((rng.standard_normal(shape) / shape[0] ** 0.5).astype("float32"))

        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((self.rows, self.depth), "float32"))
        with builder.function("main", [x], {"num_input": 1}):
            with builder.dataflow():
                normed = builder.emit(op.nn.rms_norm(x, relax.const(np.ones(self.depth, "float32")), [-1], 1e-5))
                first = builder.emit(op.matmul(normed, weight(self.depth, self.hidden)))
                hidden = builder.emit(op.nn.silu(first) if self.gated else op.nn.gelu(first))
                if self.gated:
                    up = builder.emit(op.matmul(normed, weight(self.depth, self.hidden)))
                    hidden = builder.emit(op.multiply(hidden, up))
                down = builder.emit(op.matmul(hidden, weight(self.hidden, self.depth)))
                out = builder.emit_output(op.add(x, down))
            builder.emit_func_output(out)
        return builder.get()


BLOCKS: tuple[Block, ...] = (
    Block("block ViT-S", 197, 384, 1536),
    Block("block CLIP-B", 197, 768, 3072),
    Block("block Whisper-tiny", 1500, 384, 1536),
    Block("block SmolLM2", 64, 576, 1536, True),
    Block("block SmolLM2 decode", 1, 576, 1536, True),
    Block("block shapes3", 60, CONFIG.dim, CONFIG.mlp_dim, True),
)


def measure(block: Block, turns: int, turn_s: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return wall and processor time of a call (microseconds) as one kernel, ``ours``, and as ``two``."""
    target = get_target("host").tvm_target()
    x = np.random.default_rng(1).standard_normal((block.rows, block.depth)).astype("float32")
    runs: dict[str, Callable[[], Any]] = {}
    for who, disabled in (("ours", ()), ("two", ("fuse-feed-forward",))):
        built = tvm.compile(block.module(), target, relax_pipeline=flow.pipeline(target, disabled=disabled))
        runs[who] = call_of(built, "main", [x])
    return take_turns(runs, turns, turn_s)
