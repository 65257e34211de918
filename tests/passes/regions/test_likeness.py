"""A cosine is told from other numbers by what it computes."""

from __future__ import annotations

import pytest

from crossloom.passes.regions.likeness import cosine_of
from crossloom.schedules.semantic_gate import Apply, Dot, Gate, Given, Number, Operand, Result

A, B, AB = Dot(0, 0), Dot(1, 1), Dot(0, 1)


def call(name, *args):
    return Apply(name, args)


def gate(value):
    rows = Operand((4, 8), (0,))
    return Gate((4,), 8, "float32", (rows, rows), (1,), (Result(((0, call("sigmoid", value)),)),))


LENGTHS = call("multiply", call("sqrt", A), call("power", B, Number(0.5)))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (call("divide", AB, call("maximum", LENGTHS, Number(1e-8))), True),
        (call("add", call("multiply", call("divide", AB, LENGTHS), Given(0)), Number(-0.5)), True),
        (call("multiply", call("rsqrt", A), call("multiply", AB, call("rsqrt", B))), True),
        (call("negative", call("divide", AB, LENGTHS)), True),
        (AB, False),
        (call("divide", AB, A), False),
        (call("abs", call("divide", AB, LENGTHS)), False),
        (call("tanh", call("divide", AB, LENGTHS)), False),
        (call("subtract", AB, AB), False),
        (call("sqrt", A), None),
    ],
)
def test_a_cosine_times_a_number_plus_a_number(value, found):
    assert cosine_of(gate(value)) is found
