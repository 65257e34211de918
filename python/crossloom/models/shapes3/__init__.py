"""shapes3: a small trained image + text + audio model and its data.

Importing it needs numpy and safetensors only; training (`.train`) and export
(`.export_onnx`) need PyTorch. See the README beside this file.
"""

from __future__ import annotations

from . import reference
from .config import CONFIG, Config
from .data import Sample, held_out
from .greedy import Run, accuracy, encode_prompt, generate
from .weights import path, weights

__all__ = [
    "CONFIG",
    "Config",
    "Run",
    "Sample",
    "accuracy",
    "encode_prompt",
    "generate",
    "held_out",
    "path",
    "reference",
    "weights",
]
