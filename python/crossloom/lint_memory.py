"""Compare a model with a microcontroller's flash and RAM."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import tvm

from .lint_calls import calls, constant, functions, tensors
from .lint_finding import Finding
from .model import Model
from .targets.model import Target


def _bytes(tensor: tuple[Sequence[int | str], str]) -> int:
    shape, dtype = tensor
    bits = tvm.DataType(dtype).bits
    return (math.prod(shape) * bits + 7) // 8 if all(isinstance(d, int) for d in shape) else 0


def judge_memory(mod: tvm.ir.IRModule, model: Model | None, target: Target) -> Iterator[Finding]:
    """Compare weights with flash and the largest single step with RAM; both are lower bounds."""
    flash = sum(b.bytes for b in target.banks if b.kind == "flash")
    ram = sum(b.bytes for b in target.banks if b.kind == "ram")
    weights = sum(value.nbytes for value in model.params.values()) if model is not None else 0
    source = "; ".join(dict.fromkeys(b.source for b in target.banks))
    if flash and weights > flash:
        what, why = f"weights of {weights} bytes", f"{target.name} has {flash} bytes of flash"
        yield Finding("error", "flash", "", "weights", "", what, why, source, "quantize or prune the weights")
    for gvar, function in functions(mod):
        largest, at = 0, ""
        for where, call, fixed in calls(function):
            # Weights are read from flash; the arena holds what is computed.
            live = [t for arg in call.args if not constant(arg, fixed) for t in tensors(arg)]
            need = sum(map(_bytes, [*live, *tensors(call)]))
            largest, at = max((largest, at), (need, where), key=lambda pair: pair[0])
        if ram and largest > ram:
            what = f"at least {largest} bytes of activations at once"
            why = f"{target.name} has {ram} bytes of RAM"
            yield Finding("error", "ram", gvar, at, "", what, why, source, "make the activations smaller, or use int8")
