"""What importers return and the driver compiles: a module, its weights, its entries and their modalities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import tvm


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one input or output.

    Attributes
    ----------
    name : str
    shape : tuple of int or str
        A string is a symbolic dimension, shared by name within one entry.
    dtype : str
        numpy's name, e.g. ``"float32"``.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class Entry:
    """One function a user may call.

    The Relax function's parameters are the inputs, in order, followed by the weights, in order; its attribute
    ``num_input`` is ``len(inputs)``.  The function returns one tensor, or a tuple when ``len(outputs) > 1``.

    Attributes
    ----------
    name : str
        Name of the function in the module.
    inputs, outputs : tuple of TensorSpec
    weights : tuple of str
        Keys into ``Model.params`` for the parameters after the inputs.
    modality : str
        ``"image"``, ``"audio"``, ``"text"`` or ``""``.
    upper_bounds : mapping of str to int
        Largest value of each symbolic dimension, where known (elements).
    lower_bounds : mapping of str to int
        Smallest value, where it is more than 0 (elements).
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[str, ...] = ()
    modality: str = ""
    upper_bounds: Mapping[str, int] = field(default_factory=dict)
    lower_bounds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedWeight:
    """A weight as its file stores it, kept beside its dequantized values for passes that leave it packed.

    Attributes
    ----------
    qtype : str
        Block format by ggml's name, e.g. ``"Q4_0"``; ``crossloom.importers.gguf_quant`` documents the layouts.
    shape : tuple of int
        Of the dequantized weight; blocks run along its last axis.
    data : numpy.ndarray
        Whole blocks, uint8, ``(bytes,)``, in the order of the values.
    """

    qtype: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass
class Model:
    """An imported model.

    Attributes
    ----------
    mod : tvm.ir.IRModule
        One Relax function an entry (and private functions they call).
    params : dict of str to numpy.ndarray
        Weights by name; shared between entries by sharing the name.  4-bit data is packed uint8.
    entries : dict of str to Entry
    modalities : dict of str to str
        Part name -> modality, for passes that treat branches differently.
    name : str
    packed : dict of str to PackedWeight
        Stored form of quantized weights, under their names in `params`.
    """

    mod: tvm.ir.IRModule
    params: dict[str, np.ndarray]
    entries: dict[str, Entry]
    modalities: dict[str, str] = field(default_factory=dict)
    name: str = "model"
    packed: dict[str, PackedWeight] = field(default_factory=dict)

    def entry_params(self, entry: str) -> list[np.ndarray]:
        """Return the weights of one entry, in the order its function takes them."""
        return [self.params[key] for key in self.entries[entry].weights]
