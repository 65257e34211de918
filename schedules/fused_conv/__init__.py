"""One kernel for a convolution and what is done to its sums: bias, activation, factor, residual.

``out = steps(convolve(x, W))``.  A :class:`Spec` says what is computed, :func:`kernel` writes it for a machine, and
:func:`pack_weights` puts weights in the order in which the kernel reads them, as operators on weights alone that are
computed once when a model is built.
"""

from .geometry import MOST_PHASES, Geometry
from .kernel import kernel
from .pack import pack_channels, pack_weights
from .plan import Plan, plan
from .spec import Spec, Step

__all__ = ["MOST_PHASES", "Geometry", "Plan", "Spec", "Step", "kernel", "pack_channels", "pack_weights", "plan"]
