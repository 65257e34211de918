"""Execute any entry of a Relax module on the host, numpy in and numpy out."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..errors import UnsupportedModel, UsageError
from ..importers.signature import tensor_spec
from ..runtime.checks import evaluate

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


def build_machine(
    mod: tvm.ir.IRModule, target: tvm.target.Target | None = None, lowering: tvm.transform.Pass | None = None
) -> Any:
    """Build a module for this machine.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    target : tvm.target.Target, optional
        ``llvm`` when missing.
    lowering : tvm.transform.Pass, optional
        From the module to what the virtual machine runs; TVM's default pipeline when missing.

    Returns
    -------
    tvm.relax.VirtualMachine
    """
    # A context of its own: no instrument and no option of the caller's reaches what only measures.
    with tvm.transform.PassContext():
        executable = tvm.compile(
            mod, target=target or tvm.target.Target({"kind": "llvm"}), relax_pipeline=lowering or "default"
        )
    return relax.VirtualMachine(executable, tvm.cpu())


def _machine(mod: tvm.ir.IRModule) -> Any:
    hit = _machines.get(id(mod))
    if hit is None:
        hit = _machines[id(mod)] = (mod, build_machine(mod))
        while len(_machines) > _KEEP:
            _machines.popitem(last=False)
    return hit[1]


def flatten(value: Any) -> Iterator[np.ndarray]:
    """Yield the arrays of a virtual machine's result, nested tuples in order."""
    if hasattr(value, "numpy"):
        yield np.array(value.numpy())
    elif isinstance(value, (int, float)):
        yield np.asarray(value)
    else:
        for item in value:
            yield from flatten(item)


def check_call(mod: tvm.ir.IRModule, entry: str, count: int) -> None:
    """Check that a module has an entry that takes ``count`` parameters.

    Raises
    ------
    UsageError
        Naming what there is.
    """
    entries = public_entries(mod)
    if entry not in entries:
        raise UsageError(f"no entry {entry!r} in the module", f"it has: {', '.join(entries) or 'none'}")
    wanted = len(entries[entry].params)
    if count != wanted:
        raise UsageError(f"entry {entry!r} takes {wanted} inputs, got {count}", "give weights as well as inputs")


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

    Examples
    --------
    >>> import numpy as np
    >>> from tvm import relax
    >>> bb, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((2,), "float32"))
    >>> with bb.function("main", [x]):
    ...     _ = bb.emit_func_output(bb.emit(relax.op.add(x, x)))
    >>> run_module(bb.get(), "main", [np.array([1, 2], "float32")])
    [array([2., 4.], dtype=float32)]
    """
    check_call(mod, entry, len(inputs))
    tensors = [tvm.runtime.tensor(np.asarray(x, order="C")) for x in inputs]
    return list(flatten(_machine(mod)[entry](*tensors)))


def random_inputs(
    mod: tvm.ir.IRModule, entry: str, seed: int = 0, length: int | Mapping[str, int] = 3
) -> list[np.ndarray]:
    """Draw small values for every tensor parameter of an entry.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    entry : str
    seed : int
    length : int or mapping of str to int
        Value of every symbolic dimension, or by its name (elements); dimensions that are expressions follow.

    Returns
    -------
    list of numpy.ndarray
        Floats are normal with deviation 1/2; integers and booleans are 0 or 1.

    Raises
    ------
    UsageError
        For a parameter that is not a tensor of known shape, or a dimension whose value does not follow.

    Examples
    --------
    >>> from tvm import relax, tirx
    >>> bb, n = relax.BlockBuilder(), tirx.Var("n", "int64")
    >>> x = relax.Var("x", relax.TensorType((n, 2 * n + 1), "float16"))
    >>> with bb.function("main", [x]):
    ...     _ = bb.emit_func_output(bb.emit(relax.op.negative(x)))
    >>> [(x.shape, str(x.dtype)) for x in random_inputs(bb.get(), "main", length=2)]
    [((2, 5), 'float16')]
    """
    rng = np.random.default_rng(seed)
    out: list[np.ndarray] = []
    for param in public_entries(mod)[entry].params:
        try:
            spec = tensor_spec(param.name, param.ty)
        except UnsupportedModel as error:
            raise UsageError(f"{entry}: parameter {error.message}", "give inputs=") from error
        shape = [_size(dim, length, f"{entry}: parameter {param.name!r}") for dim in spec.shape]
        if spec.dtype.startswith(("float", "bfloat")):
            out.append((rng.standard_normal(shape) * 0.5).astype(spec.dtype))
        else:  # 0 and 1 are valid indices, booleans and quantized values alike
            out.append(rng.integers(0, 2, shape).astype(spec.dtype))
    return out


def _size(dim: int | str, length: int | Mapping[str, int], owner: str) -> int:
    if isinstance(dim, int):
        return dim
    size = evaluate(dim, length if isinstance(length, Mapping) else defaultdict(lambda: length))
    if size is None or size < 0:
        raise UsageError(f"{owner} has dimension {dim}, which cannot be found", "give length= by name, or inputs=")
    return size
