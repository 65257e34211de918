"""Composite functions: a recognised operation as a call to a private function that stays executable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import ir, relax, tirx

from .driver import Site
from .sizes import same_size

Attr = str | int | float | bool | Sequence[int]


def fresh_params(inputs: Sequence[relax.Expr], names: Sequence[str]) -> list[relax.Var]:
    """Return parameters of the inputs' types over fresh symbolic variables; an expression becomes one variable."""
    renamed: list[tuple[tirx.Expr, tirx.Var]] = []

    def rename(dim: tirx.Expr) -> tirx.Expr:
        if isinstance(dim, (int, tirx.IntImm)):
            return dim
        for old, new in renamed:
            if same_size(old, dim):
                return new
        name = dim.name if isinstance(dim, tirx.Var) else f"d{len(renamed)}"
        renamed.append((dim, tirx.Var(name, "int64")))
        return renamed[-1][1]

    out = []
    for expr, name in zip(inputs, names):
        ty = expr.ty
        if isinstance(ty, relax.TensorType) and ty.shape is not None:
            ty = relax.TensorType([rename(d) for d in ty.shape], ty.dtype, ty.vdevice)
        out.append(relax.Var(name, ty))
    return out


def outline(
    site: Site,
    name: str,
    inputs: Mapping[str, relax.Expr],
    body: Callable[..., relax.Expr],
    attrs: Mapping[str, Attr] | None = None,
) -> relax.Call:
    """Return a call to a private function with attribute ``Composite`` = ``name``.

    Parameters
    ----------
    site : Site
    name : str
        e.g. ``"crossloom.rms_norm"``.
    inputs : mapping of str to relax.Expr
        Arguments by parameter name, in terms of the new function (``site[...]``).
    body : callable
        ``body(builder, **params) -> Expr``; must take shapes from its parameters only, since symbolic dimensions
        are fresh variables in the function.
    attrs : mapping
        Facts later passes read through :func:`composite_attrs`; stored as ``crossloom.<key>``.
    """
    builder = relax.BlockBuilder()
    params = fresh_params(list(inputs.values()), list(inputs))
    short = name.split(".")[-1]
    with builder.function(short, params, attrs={"Composite": name}, private=True):
        with builder.dataflow():
            result = builder.emit_output(body(builder, **dict(zip(inputs, params))))
        builder.emit_func_output(result)
    func = builder.get()[short].with_attr("Composite", name)
    for key, value in (attrs or {}).items():
        func = func.with_attr(f"crossloom.{key}", list(value) if isinstance(value, (list, tuple)) else value)
    gvar = site.builder.add_func(func, short)
    return relax.Call(gvar, list(inputs.values()))


def composite_name(func: ir.BaseFunc) -> str:
    """Return the composite's name, ``""`` for any other function."""
    return str(func.attrs["Composite"]) if func.attrs is not None and "Composite" in func.attrs else ""


def composite_attrs(func: ir.BaseFunc) -> dict[str, object]:
    """Return the facts stored by :func:`outline`, without the prefix."""
    attrs = func.attrs or {}
    return {k.removeprefix("crossloom."): attrs[k] for k in attrs.keys() if k.startswith("crossloom.")}
