"""Cross-attention's keys and values in an entry of their own."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx

from canonical import data, module
from cross import decoder, reference, weights
from crossloom.errors import UsageError
from crossloom.importers.signature import tensor_spec
from crossloom.model import Entry, Model
from crossloom.passes.cross_kv_entry import split_cross_kv
from crossloom.testing import run_module
from crossloom.verdict import Ledger

op = relax.op
N, S = (tirx.Var(n, "int64") for n in "ns")


def model(build, inputs, shapes, values, names=("decode",)):
    """Return a model of equal entries of a build."""
    mod = module(build, [*inputs, *shapes], names, num_input=len(inputs))
    func = mod[names[0]]
    specs = tuple(tensor_spec(f"in{i}", p.ty) for i, p in enumerate(func.params[: len(inputs)]))
    out = (tensor_spec("hidden", func.ret_ty),)
    keys = tuple(f"w{i}" for i in range(len(shapes)))
    entries = {name: Entry(name, specs, out, keys, "text", {"n": 64}) for name in names}
    return Model(mod, dict(zip(keys, values)), entries)


def call(made, entry, given):
    return run_module(made.mod, entry, [*given, *made.entry_params(entry)])


def test_a_decoder_over_states_that_are_an_input():
    shapes = weights(2)
    values = data(*shapes)
    whole = model(lambda e, *p: decoder(e, *p), [(1, N, 8), (1, S, 6)], shapes, values, ("prefill", "decode"))
    with Ledger() as ledger:
        out = split_cross_kv(whole)
    assert [v.fired for v in ledger] == [True] and ledger.fired[0].rewrite == "split-cross-kv"
    first, second = out.entries["cross_kv"], out.entries["decode"]
    names = ["key_0", "value_0", "key_1", "value_1"]
    assert [s.name for s in first.outputs] == names and [s.name for s in first.inputs] == ["in1"]
    assert [s.name for s in second.inputs] == ["in0", *names]
    assert first.outputs[0].shape == (1, "s", 2, 4) and first.modality == "text"
    # Each weight is where it is needed, and nowhere else.
    assert set(first.weights).isdisjoint(second.weights)
    assert set(first.weights) | set(second.weights) == set(whole.entries["decode"].weights)
    assert out.entries["prefill"] == whole.entries["prefill"]
    for sizes in ((1, 5), (4, 1)):
        h, states = data((1, sizes[0], 8), (1, sizes[1], 6))
        want = reference(h, states, *values)
        kept = call(out, "cross_kv", [states])
        for _ in range(2):
            got = call(out, "decode", [h, *kept])[0]
            assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
        assert np.abs(call(out, "prefill", [h, states])[0] - want).max() < 1e-5 * np.abs(want).max()


def test_the_encoder_moves_along_and_what_else_reads_the_states_keeps_them():
    def emit(e, h, audio, we, *given):
        states = e(op.nn.relu(e(op.matmul(audio, we))))
        return op.add(decoder(e, h, states, *given), e(op.sum(audio, keepdims=True)))

    shapes = [(5, 6), *weights(1)]
    values = data(*shapes)
    out = split_cross_kv(model(emit, [(1, N, 8), (1, S, 5)], shapes, values))
    # The sum is of the audio alone: it moves too.
    assert [s.name for s in out.entries["cross_kv"].outputs] == ["key_0", "value_0", "state_2"]
    assert out.entries["cross_kv"].weights[0] == "w0" and "w0" not in out.entries["decode"].weights
    h, audio = data((1, 2, 8), (1, 3, 5))
    want = reference(h, np.maximum(audio @ values[0], 0), *values[1:]) + audio.sum()
    got = call(out, "decode", [h, *call(out, "cross_kv", [audio])])[0]
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_states_that_are_read_together_with_others_stay_an_input():
    def emit(e, h, states, *given):
        total = e(op.sum(e(op.strided_slice(h, [2], [0], [6])), keepdims=True))
        both = e(op.multiply(total, states))
        return op.add(decoder(e, h, states, *given), e(op.strided_slice(both, [2], [0], [1])))

    values = data(*weights(1))
    out = split_cross_kv(model(emit, [(1, N, 8), (1, 1, 6)], weights(1), values))
    assert [s.name for s in out.entries["decode"].inputs] == ["in0", "in1", "key_0", "value_0"]
    h, states = data((1, 2, 8), (1, 1, 6))
    got = call(out, "decode", [h, states, *call(out, "cross_kv", [states])])[0]
    want = reference(h, states, *values) + h[..., :6].sum() * states[..., :1]
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_without_cross_attention_the_model_stays_as_it_was():
    def emit(e, h, other, *given):
        return op.add(decoder(e, h, h, *given, biased=False), other)

    whole = model(emit, [(1, N, 8), (1, N, 8)], [(8, 8)] * 4, data(*[(8, 8)] * 4))
    with Ledger() as ledger:
        assert split_cross_kv(whole) is whole
    assert [v.code for v in ledger] == ["no-cross-attention"]


def test_entries_that_do_not_fit_are_told():
    whole = model(lambda e, *p: decoder(e, *p), [(1, N, 8), (1, S, 6)], weights(1), data(*weights(1)))
    with pytest.raises(UsageError, match="no entry 'step'"):
        split_cross_kv(whole, "step")
    with pytest.raises(UsageError, match="already"):
        split_cross_kv(whole, "decode", "decode")
