"""References against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np

from crossloom.testing import references as ref


def test_norms() -> None:
    x = np.array([[3.0, 4.0]])
    np.testing.assert_allclose(ref.rms_norm(x, np.array([1.0, 2.0]), 0.0), [[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]])
    np.testing.assert_allclose(ref.layer_norm(x, np.ones(2), np.array([0.0, 1.0]), 0.0), [[-1.0, 2.0]])


def test_rotary_quarter_turn() -> None:
    x, quarter = np.array([[1.0, 2.0, 3.0, 4.0, 9.0]]), np.full((1, 2), math.pi / 2)
    np.testing.assert_allclose(ref.rotary(x, quarter), [[-3.0, -4.0, 1.0, 2.0, 9.0]])
    np.testing.assert_allclose(ref.rotary(x, quarter, "interleaved"), [[-2.0, 1.0, -4.0, 3.0, 9.0]])


def test_attention_gqa_causal_and_masked_rows() -> None:
    q, k = np.zeros((1, 2, 2, 1)), np.zeros((1, 1, 2, 1))
    v = np.array([2.0, 6.0]).reshape(1, 1, 2, 1)
    np.testing.assert_allclose(ref.attention(q, k, v, causal=True)[0, :, :, 0], [[2.0, 4.0], [2.0, 4.0]])
    mask = np.array([[0.0, 0.0], [-np.inf, -np.inf]])
    np.testing.assert_allclose(ref.attention(q, k, v, mask)[0, 0, :, 0], [4.0, 0.0])


def test_activations() -> None:
    np.testing.assert_allclose(ref.silu(np.array([0.0, math.log(3.0)])), [0.0, 0.75 * math.log(3.0)])
    np.testing.assert_allclose(ref.gelu(np.array([1.0])), [0.841344746], rtol=1e-8)
    np.testing.assert_allclose(ref.gelu(np.array([1.0]), "tanh"), [0.841191990], rtol=1e-6)
    np.testing.assert_allclose(ref.gelu(np.array([1.0]), "quick"), [1 / (1 + math.exp(-1.702))])
    one = np.ones((1, 1))
    np.testing.assert_allclose(ref.gated_mlp(one, one, 2 * one, 3 * one), [[6 / (1 + math.exp(-1.0))]])
