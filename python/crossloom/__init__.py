"""crossloom: compiler passes for Apache TVM that take multimodal models to edge devices.

``crossloom.pipeline(target)`` is the whole flow as one TVM pass; single passes are in :mod:`crossloom.passes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm

__version__ = "0.1.0"


def pipeline(target: Any = None, text: str | None = None) -> tvm.transform.Pass:
    """Return the flow of a target as one TVM pass; see :func:`crossloom.flow.pipeline`."""
    from .flow import pipeline as build

    return build(target, text)
