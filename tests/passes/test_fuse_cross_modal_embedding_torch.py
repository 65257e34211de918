"""Sequences and gates as PyTorch writes them, from the module to the kernel."""

from __future__ import annotations

import numpy as np
import pytest

from crossloom.importers.torch import from_torch
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_cross_modal_embedding import FuseCrossModalEmbedding
from crossloom.passes.fuse_semantic_gate import FuseSemanticGate
from crossloom.passes.lower_fused_gate import LowerFusedGate
from crossloom.passes.lower_fused_sequence import LowerFusedSequence
from crossloom.testing import run_module
from sequences import TARGET, composites

pytestmark = pytest.mark.torch


def check(module, example, others, region, dynamic=None):
    """Import, fuse, lower, and compare with PyTorch on all inputs."""
    import torch

    module = module.eval()
    model = from_torch(module, example, dynamic_shapes=dynamic)
    mod = CanonicalizeTransformer()(model.mod)
    fused = FuseSemanticGate()(FuseCrossModalEmbedding()(mod))
    assert composites(fused) == {region: 1}
    low = LowerFusedGate(TARGET)(LowerFusedSequence(TARGET)(fused))
    entry = next(iter(model.entries))
    for args in (example, *others):
        with torch.no_grad():
            want = module(*args).numpy()
        for step in (fused, low):
            got = run_module(step, entry, [*(a.numpy() for a in args), *model.entry_params(entry)])[0]
            np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("images", ["of one size", "of any size"])
def test_llava_merges_image_features_by_masked_scatter(images):
    import torch
    from torch import nn

    class Merge(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.projector = nn.Embedding(11, 8), nn.Linear(6, 8)

        def forward(self, ids, image):
            text = self.tokens(ids)
            mask = (ids == 3).unsqueeze(-1).expand_as(text)
            return text.masked_scatter(mask, self.projector(image))

    torch.manual_seed(0)
    first = torch.tensor([[1, 3, 3, 2, 3, 3, 0]])
    other = torch.tensor([[3, 3, 3, 3, 9]])
    length = torch.export.Dim("n", min=2, max=64)
    rows = {0: torch.export.Dim("f", min=0, max=64)} if images == "of any size" else None
    dynamic = {"ids": {1: length}, "image": rows}
    more = [(other, torch.randn(4, 6))] + ([(other, torch.randn(6, 6))] if rows else [])
    check(Merge(), (first, torch.randn(4, 6)), more, "fused_sequence", dynamic)


def test_image_and_text_joined():
    import torch
    from torch import nn

    class Join(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.norm, self.projector = nn.Embedding(11, 8), nn.LayerNorm(6), nn.Linear(6, 8)
            self.positions = nn.Parameter(torch.randn(1, 9, 8))

        def forward(self, image, ids):
            return torch.cat((self.projector(self.norm(image)), self.tokens(ids)), dim=1) + self.positions

    torch.manual_seed(0)
    check(Join(), (torch.randn(1, 5, 6), torch.tensor([[0, 10, 4, 4]])), [], "fused_sequence")


def test_a_gate_by_cosine_similarity():
    import torch
    from torch import nn
    from torch.nn import functional

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.bias = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(-0.5))

        def forward(self, image, text):
            likeness = functional.cosine_similarity(image, text, dim=-1)
            gate = torch.sigmoid(likeness * self.scale + self.bias).unsqueeze(-1)
            return gate * image + (1 - gate) * text

    torch.manual_seed(0)
    image, text = torch.randn(2, 5, 33), torch.randn(2, 5, 33)
    image[0, 1] = 0
    check(Gate(), (image, text), [(text, image)], "fused_gate")


def test_a_gate_by_normalized_vectors_over_one_pooled_one():
    import torch
    from torch import nn
    from torch.nn import functional

    class Gate(nn.Module):
        def forward(self, tokens, pooled):
            units = functional.normalize(tokens, dim=-1), functional.normalize(pooled, dim=-1)
            return tokens * torch.sigmoid((units[0] * units[1]).sum(-1, keepdim=True))

    torch.manual_seed(0)
    tokens = torch.randn(5, 16)
    check(Gate(), (tokens, torch.randn(1, 16)), [(torch.zeros(5, 16), torch.randn(1, 16))], "fused_gate")
