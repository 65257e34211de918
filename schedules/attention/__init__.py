"""One kernel for scaled dot-product attention: the scores of a block of keys, their weights and the values' sum.

``out = softmax(scale * q k^T + masks) v`` without the matrix of scores: a :class:`Spec` says where each operand's
elements lie and what masks there are, and :func:`kernel` writes it for a machine.
"""

from .kernel import kernel
from .plan import FewQueries, Plan, few_queries, plan
from .spec import Axis, Extent, Operand, Role, Spec

__all__ = ["Axis", "Extent", "FewQueries", "Operand", "Plan", "Role", "Spec", "few_queries", "kernel", "plan"]
