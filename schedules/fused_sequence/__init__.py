"""One kernel for a sequence put together of several modalities: every part is written straight to its place.

A :class:`Sequence` says what the parts are (linear layers, rows of a table, values that exist) and where their rows go:
one after the other, or wherever a placeholder token stands; :func:`kernel` writes it for a machine.
"""

from .kernel import kernel
from .spec import Addend, Copy, Layer, Lookup, Part, Product, Sequence

__all__ = ["Addend", "Copy", "Layer", "Lookup", "Part", "Product", "Sequence", "kernel"]
