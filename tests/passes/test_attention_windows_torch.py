"""Sliding windows as transformers' decoders compute them, exported by torch: proved, and equal to what torch gives."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from crossloom.importers.torch import from_torch
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_attention import FuseAttention
from crossloom.passes.lower_fused_attention import LowerFusedAttention
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.targets import get_target
from crossloom.testing import run_module

pytestmark = pytest.mark.torch


def decoder(name):
    """Return a small decoder that takes embeddings."""
    import torch

    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, {"Mistral": "MistralConfig", "Gemma3": "Gemma3TextConfig"}[name])(
        vocab_size=30,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=4,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, embeddings, *real):
            (mask,) = real or (None,)
            return self.model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits

    return Decoder()


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_windows_of_decoders(name, dynamic):
    import torch

    built, x = decoder(name), torch.randn(1, 12, 32)
    shapes = {"embeddings": {1: torch.export.Dim("s", min=2, max=64)}} if dynamic else None
    model = from_torch(built, (x,), dynamic_shapes=shapes)
    out = CanonicalizeTransformer()(model.mod)
    found = [composite_attrs(f) for _, f in out.functions_items() if composite_name(f) == "crossloom.attention"]
    assert [(f["mask"], f["offset"], f.get("window")) for f in found] == [("window", "0", 4)]
    out = LowerFusedAttention(get_target("host").tvm_target())(FuseAttention()(out))
    # TVM 0.27 cannot build the cumulative sum of bools by which positions are looked through: nothing reads it now.
    out = relax.transform.DeadCodeElimination()(out)
    for inputs in (x, *([torch.randn(1, 7, 32)] if dynamic else [])):
        with torch.no_grad():
            want = built(inputs).numpy()
        (got,) = run_module(out, "main", [inputs.numpy(), *model.entry_params("main")])
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_a_window_over_padding():
    """A mask of real tokens is read, within the window only."""
    import torch

    built, x, real = decoder("Mistral"), torch.randn(2, 12, 32), torch.ones(2, 12, dtype=torch.long)
    real[1, 9:] = 0
    model = from_torch(built, (x, real))
    out = CanonicalizeTransformer()(model.mod)
    found = [composite_attrs(f) for _, f in out.functions_items() if composite_name(f) == "crossloom.attention"]
    assert [(f["mask"], f.get("bounded"), f.get("window")) for f in found] == [("given", True, 4)]
    out = LowerFusedAttention(get_target("host").tvm_target())(FuseAttention()(out))
    with torch.no_grad():
        want = built(x, real).numpy()
    (got,) = run_module(out, "main", [x.numpy(), real.numpy(), *model.entry_params("main")])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
