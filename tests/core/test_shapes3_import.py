"""The shipped shapes3 graphs, imported, composed and compiled, compute what the numpy reference computes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from crossloom.importers.load import load_model
from crossloom.models import shapes3
from crossloom.models.shapes3 import reference
from crossloom.models.shapes3.greedy import causal_mask

DIM = shapes3.CONFIG.dim


@pytest.fixture(scope="module")
def model():
    return load_model(shapes3.path() / "shapes3.toml")


@pytest.fixture(scope="module")
def compiled(model):
    vm = relax.VirtualMachine(tvm.compile(model.mod, tvm.target.Target("llvm")), tvm.cpu())

    def run(entry, inputs):
        described = model.entries[entry]
        assert {i.name for i in described.inputs} == set(inputs)
        values = [inputs[i.name] for i in described.inputs] + model.entry_params(entry)
        out = vm[entry](*[tvm.runtime.tensor(np.ascontiguousarray(v)) for v in values])
        return [o.numpy() for o in (out if len(described.outputs) > 1 else [out])]

    return run


def agree(compiled, entry, inputs):
    ours, theirs = compiled(entry, inputs), reference.run(entry, inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.abs(a - b).max() <= 1e-4 * max(np.abs(b).max(), 1.0), entry
    return theirs


def test_five_entries_with_two_outputs_kept(model):
    assert set(model.entries) == {"vision", "audio", "embed", "prefill", "decode"}
    assert [o.name for o in model.entries["decode"].outputs] == ["logits", "present_key", "present_value"]
    assert all(model.params[k].dtype != np.float64 for e in model.entries.values() for k in e.weights)


@pytest.mark.parametrize("entry,shape", [("vision", (1, 3, 48, 48)), ("audio", (1, 40, 128))])
def test_encoders_equal_the_reference(compiled, entry, shape):
    (name,) = {"vision": ["image"], "audio": ["log_mel"]}[entry]
    agree(compiled, entry, {name: np.random.default_rng(1).standard_normal(shape).astype("float32")})


@pytest.mark.parametrize("audio,text", [(0, 5), (7, 1), (3, 0)])
def test_language_entries_equal_the_reference_at_several_lengths(compiled, audio, text):
    rng = np.random.default_rng(audio)
    parts = {
        "vision_features": rng.standard_normal((1, 36, DIM)).astype("float32"),
        "audio_features": rng.standard_normal((1, audio, DIM)).astype("float32"),
        "input_ids": rng.integers(4, 32, (1, text)),
    }
    (embeds,) = agree(compiled, "embed", parts)
    length = embeds.shape[1]
    inputs = {
        "inputs_embeds": embeds,
        "attention_mask": causal_mask(length),
        "position_ids": np.arange(length)[None],
    }
    _, key, value = agree(compiled, "prefill", inputs)
    for step in range(2):
        inputs = {
            "input_ids": rng.integers(4, 32, (1, 1)),
            "attention_mask": np.zeros((1, 1, 1, length + step + 1), "float32"),
            "position_ids": np.array([[length + step]]),
            "past_key": key,
            "past_value": value,
        }
        _, key, value = agree(compiled, "decode", inputs)
