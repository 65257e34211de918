"""Turn composites back into the operators they stand for, so that operator fusion sees one graph.

    y = rms_norm(x, w)            # private function, Composite = "crossloom.rms_norm"
->  y = R.nn.rms_norm(x, w, ...)

Fires for every call to a private Relax function.  Never for functions with a global symbol, which is what a code
generator's regions have.  Numerics: exact.  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo


def InlineComposites() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    return relax.transform.InlinePrivateFunctions()


PASS = PassInfo("inline-composites", InlineComposites, "lower", EXACT, doc="composites become plain operators again")
