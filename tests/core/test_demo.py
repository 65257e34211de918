"""What the demonstration's check accepts and refuses; the measuring it stands on."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from checkout import benchmark
from crossloom.models import shapes3


@pytest.fixture(scope="module")
def modules():
    return benchmark("demo"), benchmark("fidelity")


GOOD = {
    "answers": [{"device": "host", "question": "text", "n": 9, "right": 8, "reference_right": 8, "tokens_equal": 0.99}],
    "errors": {"qemu": {"vision": 9e-4, "decode": 0.0}},
    "passes": {"p": {"error": 0.0, "contract": "exact", "within": True}},
}


@pytest.mark.parametrize(
    "path,value,message",
    [
        (("answers", 0, "right"), 7, "7 of 9 right, the reference has 8"),
        (("answers", 0, "right"), 9, "9 of 9 right"),
        (("answers", 0, "tokens_equal"), 0.98, "98.00% of the tokens"),
        (("errors", "qemu", "vision"), 2e-3, "qemu, vision: error 0.002"),
        (("errors", "qemu", "decode"), float("nan"), "decode: error nan"),
        (("passes", "p", "within"), False, "pass p: error 0 breaks exact"),
    ],
)
def test_check_names_each_shortfall(modules, path, value, message):
    demo, _ = modules
    assert demo.shortfalls(GOOD) == []
    bad = copy.deepcopy(GOOD)
    place = bad
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (found,) = demo.shortfalls(bad)
    assert message in found


def test_token_agreement_counts_missing_tokens(modules):
    _, fidelity = modules
    a = fidelity.Answers(["", ""], [[1, 2, 3], [4]], 0, 0.0)
    b = fidelity.Answers(["", ""], [[1, 9, 3, 5], [4]], 0, 0.0)
    assert fidelity.token_agreement(a, b) == fidelity.token_agreement(b, a) == 3 / 5
    assert fidelity.token_agreement(a, a) == 1.0


def test_the_reference_agrees_with_itself_and_a_perturbed_one_does_not(modules):
    _, fidelity = modules
    run = shapes3.reference.run
    sample = shapes3.held_out(1)
    calls = fidelity.record_calls(run, sample)
    assert {entry for entry, _ in calls} == {"vision", "embed", "prefill", "decode"}
    assert set(fidelity.entry_errors(run, run, calls).values()) == {0.0}

    def off(entry, inputs):
        outputs = run(entry, inputs)
        return [outputs[0] + np.float32(0.5), *outputs[1:]] if entry == "vision" else outputs

    errors = fidelity.entry_errors(off, run, calls)
    assert errors["vision"] > 1e-3 and errors["decode"] == 0.0
    answers = fidelity.answer(run, sample)
    assert answers.texts == [sample[0].answer] and answers.accuracy == 1.0 and len(answers.tokens[0]) > 1
