"""Check the inputs of a call against what the entry says, before anything runs."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from crossloom.errors import UsageError
from crossloom.model import Entry, TensorSpec


class HasShape(Protocol):
    """What a check needs: arrays and tensors that stay on the device both have it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


def check_inputs(entry: Entry, inputs: Mapping[str, HasShape]) -> dict[str, int]:
    """Check names, types, ranks and sizes of `inputs`.

    Parameters
    ----------
    entry : Entry
    inputs : mapping of str to array

    Returns
    -------
    sizes : dict of str to int
        The value of every symbolic dimension.

    Raises
    ------
    UsageError
        Names the input, what it should be and what it is.
    """
    names = [spec.name for spec in entry.inputs]
    expected = ", ".join(names) or "none"
    for name in names:
        if name not in inputs:
            raise UsageError(f"entry `{entry.name}` needs input `{name}`", f"its inputs: {expected}")
    for name in inputs:
        if name not in names:
            raise UsageError(f"entry `{entry.name}` has no input `{name}`", f"its inputs: {expected}")
    sizes: dict[str, int] = {}
    bound_by: dict[str, str] = {}
    derived: list[tuple[TensorSpec, int, str, int]] = []
    for spec in entry.inputs:
        value = inputs[spec.name]
        shape = tuple(int(n) for n in value.shape)
        if str(np.dtype(value.dtype)) != spec.dtype:
            raise UsageError(
                f"input `{spec.name}` of entry `{entry.name}` has type {value.dtype}, wanted {spec.dtype}",
                f'convert it with .astype("{spec.dtype}")',
            )
        if len(shape) != len(spec.shape):
            raise _wrong_shape(entry, spec, shape)
        for axis, (want, have) in enumerate(zip(spec.shape, shape)):
            if isinstance(want, int):
                if want != have:
                    raise _wrong_shape(entry, spec, shape)
            elif not want.isidentifier():
                derived.append((spec, axis, want, have))
            elif sizes.setdefault(want, have) != have:
                raise UsageError(
                    f"input `{spec.name}` of entry `{entry.name}` has {want} = {have}, "
                    f"but `{bound_by[want]}` has {want} = {sizes[want]}",
                    f"`{want}` must be one size in all inputs",
                )
            else:
                bound_by.setdefault(want, spec.name)
    for name, bound in entry.upper_bounds.items():
        if sizes.get(name, 0) > bound:
            raise UsageError(
                f"input `{bound_by[name]}` of entry `{entry.name}` has {name} = {sizes[name]}, at most {bound}",
                f"pass fewer elements, or compile with a larger bound of `{name}`",
            )
    for name, bound in entry.lower_bounds.items():
        if sizes.get(name, bound) < bound:
            raise UsageError(
                f"input `{bound_by[name]}` of entry `{entry.name}` has {name} = {sizes[name]}, at least {bound}",
                f"pass {bound} or more elements along `{name}`",
            )
    for spec, axis, text, have in derived:
        wanted = evaluate(text, sizes)
        if wanted is not None and wanted != have:
            raise UsageError(
                f"input `{spec.name}` of entry `{entry.name}` has {have} along axis {axis}, wanted {text} = {wanted}",
                "make the inputs agree",
            )
    return sizes


def evaluate(text: str, sizes: Mapping[str, int]) -> int | None:
    """Return the value of a dimension such as ``"past + 1"``, None where a symbol in it has no value yet."""
    try:
        return _evaluate(ast.parse(text, mode="eval").body, sizes)
    except (SyntaxError, KeyError, ZeroDivisionError):
        return None


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, sizes), _evaluate(node.right, sizes)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
    raise KeyError(ast.dump(node))


def _wrong_shape(entry: Entry, spec: TensorSpec, shape: tuple[int, ...]) -> UsageError:
    wanted = "(" + ", ".join(map(str, spec.shape)) + ")"
    return UsageError(
        f"input `{spec.name}` of entry `{entry.name}` has shape {shape}, wanted {wanted}",
        "pass an array of the wanted shape",
    )
