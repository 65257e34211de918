"""Tests for passes: run, generate, compare, bisect."""

from typing import TYPE_CHECKING

from .bisection import Culprit
from .execution import BundleExecutor, Call, Executor, HostExecutor, as_model, make_calls
from .instrument import NumericsBudgetExceeded, NumericsInstrument
from .repro import replay, write_repro
from .runner import random_inputs, run_module
from .stages import Record, Stage, compile_stages, contract_of, render, walk
from .verify import bisect, verify_pipeline

if TYPE_CHECKING:
    from .preserve import assert_pass_preserves

__all__ = [
    "BundleExecutor",
    "Call",
    "Culprit",
    "Executor",
    "HostExecutor",
    "NumericsBudgetExceeded",
    "NumericsInstrument",
    "Record",
    "Stage",
    "as_model",
    "assert_pass_preserves",
    "bisect",
    "compile_stages",
    "contract_of",
    "make_calls",
    "random_inputs",
    "render",
    "replay",
    "run_module",
    "verify_pipeline",
    "walk",
    "write_repro",
]


def __getattr__(name: str) -> object:
    if name == "assert_pass_preserves":  # hypothesis is a test dependency: loaded when asked for
        from .preserve import assert_pass_preserves

        return assert_pass_preserves
    raise AttributeError(name)
