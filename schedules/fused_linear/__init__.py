"""One kernel for a linear layer and what surrounds it: norm in front; bias, activation, gate, rotary, residual behind.

``out[i] = residual[i] + rotate(norm(activate(turn(norm(x)) @ W[i] + bias[i])))``, each step there or not, for any
number of results of one x.  A
:class:`Spec` says what is computed, :func:`kernel` writes it for a machine, and :func:`pack_weights` puts weights in
the order in which the kernel reads them, as operators on weights alone that are computed once when a model is built.
"""

from .kernel import kernel, own_kernel
from .pack import pack_bias, pack_weights
from .plan import Plan, plan
from .spec import Dim, Norm, Output, Rotary, Spec, Turn

__all__ = [
    "Dim",
    "Norm",
    "Output",
    "Plan",
    "Rotary",
    "Spec",
    "Turn",
    "kernel",
    "own_kernel",
    "pack_bias",
    "pack_weights",
    "plan",
]
