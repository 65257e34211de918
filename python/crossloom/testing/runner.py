"""Execute any entry of a Relax module on the host, numpy in and numpy out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..errors import UsageError

#: One machine per module *object*; the module is kept beside it so that its id cannot be reused.
_machines: OrderedDict[int, tuple[tvm.ir.IRModule, Any]] = OrderedDict()
_KEEP = 16


def public_entries(mod: tvm.ir.IRModule) -> dict[str, relax.Function]:
    """Return the Relax functions a user can call (those with a global symbol), by name, sorted."""
    found = {
        gvar.name_hint: func
        for gvar, func in mod.functions_items()
        if isinstance(func, relax.Function) and func.attrs is not None and "global_symbol" in func.attrs
    }
    return dict(sorted(found.items()))


def _machine(mod: tvm.ir.IRModule) -> Any:
    hit = _machines.get(id(mod))
    if hit is None:
        executable = tvm.compile(mod, target=tvm.target.Target({"kind": "llvm"}))
        hit = _machines[id(mod)] = (mod, relax.VirtualMachine(executable, tvm.cpu()))
        while len(_machines) > _KEEP:
            _machines.popitem(last=False)
    return hit[1]


def _flat(value: Any) -> Iterator[np.ndarray]:
    if hasattr(value, "numpy"):
        yield np.array(value.numpy())
    elif isinstance(value, (int, float)):
        yield np.asarray(value)
    else:
        for item in value:
            yield from _flat(item)


def run_module(mod: tvm.ir.IRModule, entry: str, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run one entry under TVM's default pipeline for ``llvm``.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        Not modified. Built once per object.
    entry : str
        Name of a public Relax function.
    inputs : sequence of numpy.ndarray
        All parameters, weights included, in order.

    Returns
    -------
    list of numpy.ndarray
        The results, nested tuples flattened in order.

    Raises
    ------
    UsageError
        When there is no such entry or the number of inputs is wrong.
    """
    entries = public_entries(mod)
    if entry not in entries:
        raise UsageError(f"no entry {entry!r} in the module", f"it has: {', '.join(entries) or 'none'}")
    wanted = len(entries[entry].params)
    if len(inputs) != wanted:
        raise UsageError(f"entry {entry!r} takes {wanted} inputs, got {len(inputs)}", "give weights as well as inputs")
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(x)) for x in inputs]
    return list(_flat(_machine(mod)[entry](*tensors)))


def random_inputs(mod: tvm.ir.IRModule, entry: str, seed: int = 0, length: int = 3) -> list[np.ndarray]:
    """Draw small values for every tensor parameter of an entry.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    entry : str
    seed : int
    length : int
        Value of every symbolic dimension (elements).

    Raises
    ------
    UsageError
        For a parameter that is not a tensor of known shape, or one whose symbolic dimension is an expression.
    """
    rng = np.random.default_rng(seed)
    out: list[np.ndarray] = []
    for param in public_entries(mod)[entry].params:
        ty = param.ty
        if not isinstance(ty, relax.TensorType) or ty.shape is None:
            raise UsageError(f"{entry}: parameter {param.name} is not a tensor of known shape", "give inputs=")
        shape = []
        for dim in ty.shape:
            if not isinstance(dim, (int, tvm.tirx.IntImm, tvm.tirx.Var)):
                raise UsageError(f"{entry}: parameter {param.name} has dimension {dim}", "give inputs=")
            shape.append(length if isinstance(dim, tvm.tirx.Var) else int(dim))
        dtype = str(ty.dtype)
        if dtype.startswith(("float", "bfloat")):
            out.append((rng.standard_normal(shape) * 0.5).astype(dtype))
        else:  # 0 and 1 are valid indices, booleans and quantized values alike
            out.append(rng.integers(0, 2, shape).astype(dtype))
    return out
