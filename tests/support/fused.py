"""What the tests of fusing passes share: layers to draw, the way from a graph to its regions."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from tvm import relax

from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_name
from crossloom.testing.strategies import build
from crossloom.verdict import Ledger


def fused(mod, *passes):
    """Return what passes make of a canonicalized module, well-formed, and the ledger of the passes."""
    mod = CanonicalizeTransformer()(mod)
    with Ledger() as ledger:
        for run in passes:
            mod = run(mod)
    relax.analysis.well_formed(mod)
    return mod, ledger


def calls(mod, name):
    """Return the composites that a function calls, in order, without the prefix of ours."""
    out = []
    for block in mod[name].body.blocks:
        for binding in block.bindings:
            op = getattr(binding.value, "op", None)
            if op in mod.functions and composite_name(mod[op]):
                out.append(composite_name(mod[op]).removeprefix("crossloom."))
    return out


@st.composite
def layers(draw, emit, reference, shapes, dtypes=("float32", "float16")):
    """Draw ``emit`` over (n, d) rows, sizes d, m, k: ``shapes`` is a function of them."""
    sizes = [draw(st.sampled_from([1, 2, 3, 5, 7, 8, 13, 16, 17, 33])) for _ in range(3)]
    return build(draw, shapes(*sizes), emit, reference, draw(st.sampled_from(dtypes)))


def canonicalized(cases):
    """Return a strategy's cases with their composites: what a fusing pass is given."""
    return cases.map(lambda case: replace(case, mod=CanonicalizeTransformer()(case.mod)))
