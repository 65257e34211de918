"""How a compiled shapes3 compares with its numpy reference: answers, tokens, tensors, and what each pass changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tvm

from crossloom.flow import vm_lowering
from crossloom.model import Model
from crossloom.models import shapes3
from crossloom.models.shapes3 import Run, Sample
from crossloom.numerics import Numerics, worst_error
from crossloom.targets import Target
from crossloom.testing.execution import Call, HostExecutor
from crossloom.testing.stages import compile_stages, walk

#: Inputs by name.
Inputs = Mapping[str, np.ndarray]


@dataclass
class Recorder:
    """An executor of the entries that remembers what was asked of it and which tokens came out.

    Attributes
    ----------
    run : callable
        ``run(entry, inputs) -> outputs``.
    calls : list of (str, dict)
        Entry and inputs of every call.
    tokens : list of int
        The most likely token after each prefill and decode.
    """

    run: Run
    calls: list[tuple[str, dict[str, np.ndarray]]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __call__(self, entry: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Run one entry."""
        outputs = self.run(entry, inputs)
        self.calls.append((entry, inputs))
        if entry in ("prefill", "decode"):
            self.tokens.append(int(np.argmax(outputs[0][0, -1])))
        return outputs


@dataclass(frozen=True)
class Answers:
    """What an executor answered to some samples.

    Attributes
    ----------
    texts : list of str
    tokens : list of list of int
        Including the one that ends the answer.
    right : int
        Answers that equal the sample's.
    seconds : float
        Wall time of all of them.
    """

    texts: list[str]
    tokens: list[list[int]]
    right: int
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 where nothing was asked."""
        return self.right / len(self.texts) if self.texts else 0.0


def answer(run: Run, samples: Sequence[Sample]) -> Answers:
    """Let an executor answer samples greedily, each from nothing."""
    texts, tokens = [], []
    start = time.perf_counter()
    for sample in samples:
        recorder = Recorder(run)
        texts.append(shapes3.generate(recorder, sample))
        tokens.append(recorder.tokens)
    seconds = time.perf_counter() - start
    return Answers(texts, tokens, sum(t == s.answer for t, s in zip(texts, samples)), seconds)


def token_agreement(ours: Answers, theirs: Answers) -> float:
    """Return the share of equal tokens, position by position; a missing token is a different one."""
    same = total = 0
    for a, b in zip(ours.tokens, theirs.tokens, strict=True):
        same += sum(x == y for x, y in zip(a, b))
        total += max(len(a), len(b))
    return same / total if total else 1.0


def record_calls(run: Run, samples: Sequence[Sample]) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Return every call that answering `samples` takes, with the inputs `run` itself produces on the way."""
    recorder = Recorder(run)
    for sample in samples:
        shapes3.generate(recorder, sample)
    return recorder.calls


def entry_errors(run: Run, reference: Run, calls: Sequence[tuple[str, dict[str, np.ndarray]]]) -> dict[str, float]:
    """Return each entry's worst normwise error (see :func:`crossloom.numerics.worst_error`) on the same inputs."""
    worst: dict[str, float] = {}
    for entry, inputs in calls:
        for want, got in zip(reference(entry, inputs), run(entry, inputs), strict=True):
            worst[entry] = max(worst.get(entry, 0.0), worst_error(want, got))
    return worst


@dataclass(frozen=True)
class PassEffect:
    """What one pass did: whether the module changed, its worst normwise error against the module before it, and
    its declared contract."""

    changed: bool
    error: float
    contract: str
    within: bool


def pass_effects(
    model: Model,
    target: Target,
    calls: Sequence[tuple[str, Inputs]],
    on_pass: Callable[[str], None] = lambda name: None,
) -> dict[str, PassEffect]:
    """Run a target's pipeline pass by pass on this machine, and the module before and after each on `calls`.

    Returns
    -------
    dict of str to PassEffect
        By pass, in order.  A pass that left the module structurally equal is not run again: its error is 0.
    """
    asked = [Call(entry, tuple(inputs[spec.name] for spec in model.entries[entry].inputs)) for entry, inputs in calls]
    execute = HostExecutor(target.tvm_target(), tvm.transform.Sequential(list(vm_lowering())))
    out: dict[str, PassEffect] = {}
    for step in walk(model, compile_stages(target), execute, asked, strict=True, on_stage=on_pass):
        r = step.record
        out[r.name] = PassEffect(r.changed, r.worst_error, _contract(r.numerics), not r.problem)
    return out


def _contract(numerics: Numerics) -> str:
    """Return a class with its bound for float32, the dtype shapes3 computes in."""
    bound = numerics.bound("float32")
    return f"{numerics.kind} ({bound:g})" if bound else numerics.kind
