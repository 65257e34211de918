"""masked_scatter against PyTorch itself; runs where PyTorch is installed."""

from __future__ import annotations

import numpy as np
import pytest

from crossloom.errors import UnsupportedModel
from crossloom.importers.torch import from_torch
from crossloom.testing import run_module

pytestmark = pytest.mark.torch


def scatter():
    import torch

    class Scatter(torch.nn.Module):
        def forward(self, base, mask, source):
            return base.masked_scatter(mask, source)

    return Scatter()


@pytest.mark.parametrize("mask", [(2, 5, 4), (5, 1), (1,), (4,)])
@pytest.mark.parametrize("dynamic", [True, False])
def test_true_elements_take_the_sources_in_order(mask, dynamic):
    import torch

    torch.manual_seed(0)
    count = torch.export.Dim("f", min=0, max=64)
    model = from_torch(
        scatter(),
        (torch.randn(2, 5, 4), torch.rand(mask) < 0.5, torch.randn(12, 4)),
        dynamic_shapes={"base": None, "mask": None, "source": {0: count}} if dynamic else None,
    )
    for true in (0.5, 1.0, 0.0):
        args = torch.randn(2, 5, 4), torch.rand(mask) < true, torch.randn(12, 4)
        want = args[0].masked_scatter(args[1], args[2])
        got = run_module(model.mod, next(iter(model.entries)), [a.numpy() for a in args])[0]
        assert np.array_equal(got, want.numpy())


def test_where_there_is_no_source_nothing_outside_is_read():
    import torch

    count = torch.export.Dim("f", min=0, max=64)
    args = torch.randn(5, 4), torch.ones(5, 1, dtype=torch.bool), torch.randn(5, 4)
    model = from_torch(scatter(), args, dynamic_shapes={"base": None, "mask": None, "source": {0: count}})
    entry = next(iter(model.entries))
    nothing = np.zeros((0, 4), "float32")
    assert np.isnan(run_module(model.mod, entry, [args[0].numpy(), args[1].numpy(), nothing])[0]).all()
    base = args[0].numpy()
    assert np.array_equal(run_module(model.mod, entry, [base, np.zeros((5, 1), bool), nothing])[0], base)


def test_a_mask_that_is_larger_than_the_tensor_is_refused():
    import torch

    with pytest.raises(UnsupportedModel, match="does not fit"):
        from_torch(scatter(), (torch.randn(1, 4), torch.ones(5, 1, dtype=torch.bool), torch.randn(5, 4)))
