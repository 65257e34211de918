"""Tests for passes: run, generate, compare, bisect.  See :mod:`crossloom.testing.preserve` for an example."""

from .runner import random_inputs, run_module
from .verify import Culprit, Record, bisect, render, verify_pipeline, write_repro

__all__ = [
    "Culprit",
    "Record",
    "assert_pass_preserves",
    "bisect",
    "random_inputs",
    "render",
    "run_module",
    "verify_pipeline",
    "write_repro",
]


def __getattr__(name: str) -> object:
    if name == "assert_pass_preserves":  # hypothesis is a test dependency: loaded when asked for
        from .preserve import assert_pass_preserves

        return assert_pass_preserves
    raise AttributeError(name)
