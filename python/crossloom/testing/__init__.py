"""Tests for passes: generate modules, run them, compare, bisect.

**Your own pass in one line.**  Say what it may do to the numbers, and hand it modules:

>>> import tvm
>>> from tvm import relax
>>> from tvm.relax.expr_functor import PyExprMutator, mutator
>>> from crossloom.numerics import REASSOCIATES
>>> from crossloom.testing import assert_pass_preserves, strategies
>>> def each_silu(mod, replacement):
...     @mutator
...     class Replace(PyExprMutator):
...         def visit_call_(self, call):
...             call = super().visit_call_(call)
...             is_silu = call.op == tvm.ir.Op.get("relax.nn.silu")
...             return replacement(self.builder_, call.args[0]) if is_silu else call
...     walker = Replace(mod)
...     for gvar, func in mod.functions_items():
...         if isinstance(func, relax.Function):
...             walker.builder_.update_func(gvar, walker.visit_expr(func))
...     return walker.builder_.get()
>>> @tvm.transform.module_pass(opt_level=0, name="ExpandSilu")
... def expand_silu(mod, ctx):
...     return each_silu(mod, lambda bb, x: relax.op.multiply(x, bb.emit(relax.op.sigmoid(x))))
>>> assert_pass_preserves(expand_silu, strategies.gated_mlp(), numerics=REASSOCIATES, max_examples=2)

It is run on modules of one entry or two, in float32 and float16, of static sizes and of a symbolic length at 0, 1 and 3
tokens, with weights as parameters and as constants, with duplicated outputs and nested tuples.  Outputs must agree
within the class; the result must be well-formed and the input untouched; twice must equal once.  Without a
strategy the modules are any of :mod:`crossloom.testing.strategies`; a registered pass needs no ``numerics``.
A failure names pass, entry, length, output, error and bound, and prints the module:

>>> @tvm.transform.module_pass(opt_level=0, name="ForgetGate")
... def forget_gate(mod, ctx):
...     return each_silu(mod, lambda bb, x: relax.op.sigmoid(x))
>>> assert_pass_preserves(forget_gate, strategies.gated_mlp(), numerics=REASSOCIATES)  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
AssertionError: pass ForgetGate: entry main..., output 0 (float...): error ... > ...
...

**A pipeline on a module of your own**, pass by pass; ``bisect`` names the first rewrite at fault and ``write_repro``
writes a folder that shows it alone:

>>> bb, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((2, 3), "float32"))
>>> with bb.function("main", [x]):
...     _ = bb.emit_func_output(bb.emit(relax.op.nn.silu(x)))
>>> steps = [("expand-silu", expand_silu, REASSOCIATES), ("legalize", relax.transform.LegalizeOps(), REASSOCIATES)]
>>> [record.problem for record in verify_pipeline(bb.get(), steps)], bisect(bb.get(), steps)
(['', ''], None)

**In a flow that TVM runs**, :class:`NumericsInstrument` measures every pass of a ``PassContext``:

>>> instrument = NumericsInstrument(contracts={"ExpandSilu": REASSOCIATES}, budget=1e-4)
>>> with tvm.transform.PassContext(instruments=[instrument]):
...     _ = tvm.transform.Sequential([expand_silu, relax.transform.FuseOps()])(bb.get())
>>> [(r.name, r.changed, r.problem) for r in instrument.records]
[('sequential', True, ''), ('ExpandSilu', True, ''), ('FuseOps', False, '')]

A strategy of your own calls :func:`crossloom.testing.strategies.build`; references in numpy, in float64, are in
:mod:`crossloom.testing.references`.
"""

from typing import TYPE_CHECKING

from .bisection import Culprit
from .execution import BundleExecutor, Call, Executor, HostExecutor, as_model, make_calls
from .instrument import NumericsBudgetExceeded, NumericsInstrument
from .records import Record, render
from .repro import replay, write_repro
from .runner import random_inputs, run_module
from .stages import Stage, compile_stages, contract_of, walk
from .verify import bisect, verify_pipeline

if TYPE_CHECKING:
    from .preserve import assert_pass_preserves

__all__ = [
    "BundleExecutor",
    "Call",
    "Culprit",
    "Executor",
    "HostExecutor",
    "NumericsBudgetExceeded",
    "NumericsInstrument",
    "Record",
    "Stage",
    "as_model",
    "assert_pass_preserves",
    "bisect",
    "compile_stages",
    "contract_of",
    "make_calls",
    "random_inputs",
    "render",
    "replay",
    "run_module",
    "verify_pipeline",
    "walk",
    "write_repro",
]


def __getattr__(name: str) -> object:
    if name == "assert_pass_preserves":  # hypothesis is a test dependency: loaded when asked for
        from .preserve import assert_pass_preserves

        return assert_pass_preserves
    raise AttributeError(name)
