"""Modules spelled as Hugging Face, Whisper, CLIP and GPT-2 spell them, exported by torch: recognised and preserved."""

from __future__ import annotations

import math

import numpy as np
import pytest

from crossloom.importers.torch import from_torch
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.testing import run_module

pytestmark = pytest.mark.torch


def recognised(module, *args, dynamic_shapes=None, other=None, tolerance=2e-5):
    """Import, canonicalize, compare with torch; return composites as (name, facts), and what is left outside."""
    import torch

    model = from_torch(module.eval(), args, dynamic_shapes=dynamic_shapes)
    out = CanonicalizeTransformer()(model.mod)
    for inputs in (args, *(other or ())):
        with torch.no_grad():
            want = module(*inputs).numpy()
        (got,) = run_module(out, "main", [*[a.numpy() for a in inputs], *model.entry_params("main")])
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    return _composites(out)


def decomposed(module, *args):
    """As ``recognised``, after torch's default decompositions, which leave no attention operator."""
    import torch
    from tvm.relax.frontend.torch import from_exported_program

    with torch.no_grad():
        program = torch.export.export(module.eval(), args).run_decompositions()
        want = module(*args).numpy()
    mod = from_exported_program(program, run_ep_decomposition=False, unwrap_unit_return_tuple=True)
    out = CanonicalizeTransformer()(mod)
    (got,) = run_module(out, "main", [a.numpy() for a in args])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    return _composites(out)


def _composites(out):
    found = [
        (composite_name(f).removeprefix("crossloom."), composite_attrs(f), [p.name for p in f.params])
        for _, f in out.functions_items()
        if composite_name(f)
    ]
    outside = [
        binding.value.op.name
        for block in out["main"].body.blocks
        for binding in block.bindings
        if hasattr(getattr(binding.value, "op", None), "name")
    ]
    return found, outside


def module(forward, **state):
    """A module whose parameters and layers are ``state``."""
    import torch
    from torch import nn

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in state.items():
                setattr(self, name, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)

        def forward(self, *args):
            return forward(self, *args)

    return Module()


def rand(*shape, seed=0):
    import torch

    torch.manual_seed(seed)
    return torch.randn(*shape)


# norms


def llama(self, x):
    import torch

    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return self.weight * x.to(dtype)


def gemma(self, x):
    import torch

    out = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + self.weight.float())).type_as(x)


def by_sqrt(self, x):
    import torch

    return self.weight * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6))


def bare_rms(self, x):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def bare_operator(self, x):
    from torch import nn

    return nn.functional.rms_norm(x, (8,), None, 1e-6)


def old_layer_norm(self, x):
    import torch

    mean = x.mean(-1, keepdim=True)
    spread = (x - mean).pow(2).mean(-1, keepdim=True)
    return self.weight * ((x - mean) / torch.sqrt(spread + 1e-6)) + self.weight


def annotated(self, x):
    import torch

    spread = x.var(-1, keepdim=True, unbiased=False)
    return self.weight * (x - x.mean(-1, keepdim=True)) / torch.sqrt(spread + 1e-6) + self.weight


@pytest.mark.parametrize(
    ("forward", "kind", "operands"),
    [
        (llama, "rms_norm", 2),
        (gemma, "rms_norm", 2),
        (by_sqrt, "rms_norm", 2),
        (bare_rms, "rms_norm", 1),
        (bare_operator, "rms_norm", 1),
        (old_layer_norm, "layer_norm", 3),
        (annotated, "layer_norm", 3),
    ],
)
def test_norms(forward, kind, operands):
    found, _ = recognised(module(forward, weight=rand(8)), rand(2, 3, 8, seed=1))
    ((name, facts, params),) = found
    assert (name, len(params), list(facts["axes"])) == (kind, operands, [-1])
    assert facts["epsilon"] == pytest.approx(1e-6)


@pytest.mark.parametrize("forward", [llama, gemma])
def test_norms_in_half_precision(forward):
    found, _ = recognised(module(forward, weight=rand(8)).half(), 300 * rand(2, 8, seed=1).half(), tolerance=2e-3)
    assert [name for name, *_ in found] == ["rms_norm"]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("half", [False, True])
def test_layer_norm_operator(options, half):
    from torch import nn

    layer, x = nn.LayerNorm(8, **options), rand(2, 3, 8)
    layer, x = (layer.half(), x.half()) if half else (layer, x)
    found, outside = recognised(layer, x, tolerance=2e-3 if half else 2e-5)
    # The importer fills in what is missing: the operator has three operands.
    assert [(name, len(params)) for name, _, params in found] == [("layer_norm", 3)] and not outside


# attention


def repeat_kv(x, times):
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)


def sdpa(times=1, **options):
    def forward(self, q, k, v, *mask):
        import torch

        k, v = (repeat_kv(x, times) if times > 1 else x for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, *mask, **options)

    return module(forward)


def eager(self, q, k, v, mask):
    import torch

    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    weights = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
    weights = weights + mask[:, :, :, : k.shape[-2]]
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def batched(self, q, k, v, mask):
    """OPT, Bart, early CLIP and Whisper: heads folded into the batch."""
    import torch

    batch, heads, length, dim = q.shape
    q, k, v = (x.reshape(batch * heads, -1, dim) for x in (q * dim**-0.5, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).view(batch, heads, length, -1) + mask
    weights = torch.softmax(weights.view(batch * heads, length, -1), dim=-1)
    return torch.bmm(weights, v).view(batch, heads, length, dim)


def qkv(kv=4, length=5):
    return rand(2, 4, length, 4), rand(2, kv, length, 4, seed=1), rand(2, kv, length, 4, seed=2)


def float_mask():
    import torch

    return torch.full((5, 5), float("-inf")).triu(1)[None, None]


CASES = {
    "plain": (sdpa, {}, 4, False, {"scale": 0.5, "groups": 1, "mask": "none", "masked": False}),
    "scale": (sdpa, {"scale": 0.3}, 4, False, {"scale": 0.3}),
    "float mask": (sdpa, {}, 4, True, {"mask": "given", "mask_form": "add"}),
    "is_causal": (sdpa, {"is_causal": True}, 4, False, {"mask": "causal", "masked": True, "empty_rows": "zero"}),
    "repeat_kv": (sdpa, {"times": 2}, 2, False, {"groups": 2}),
    "enable_gqa": (sdpa, {"enable_gqa": True}, 2, False, {"groups": 2}),
    "causal gqa": (sdpa, {"enable_gqa": True, "is_causal": True}, 2, False, {"groups": 2, "mask": "causal"}),
    "eager": (lambda: module(eager), {}, 2, True, {"groups": 2, "scale": 0.5, "out_layout": "bshd"}),
    "folded": (lambda: module(batched), {}, 4, True, {"scale": 0.5, "out_layout": "bhsd", "layout": "bhsd"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", [recognised, decomposed])
def test_attention(name, how):
    make, options, heads, masked, wanted = CASES[name]
    found, outside = how(make(**options), *qkv(heads), *([float_mask()] if masked else []))
    ((kind, facts, params),) = found
    assert kind == "attention" and len(params) == 3 + bool(facts["masked"])
    for key, value in wanted.items():
        assert facts[key] == (pytest.approx(value) if key == "scale" else value)
    # torch multiplies q and k by the root of the scale each, and guards rows that keep nothing.
    if how is decomposed and make is sdpa:
        assert facts["empty_rows"] == "zero"
    assert not {"relax.matmul", "relax.nn.softmax", "relax.nn.attention", "relax.permute_dims"} & set(outside)


def test_boolean_mask():
    keep = float_mask() == 0
    found, _ = recognised(sdpa(), *qkv(), keep)
    assert [(f["mask_form"], f["empty_rows"], f["mask"]) for _, f, _ in found] == [("keep", "zero", "given")]
    found, _ = decomposed(sdpa(), *qkv(), keep)
    assert [(f["mask_form"], f["mask"]) for _, f, _ in found] == [("add", "given")]


def masked_in_forward(self, q, k, v):
    """The mask Hugging Face computes: triu(full(min), 1) * (arange > position), widened to the batch."""
    import torch

    length = q.shape[2]
    position = torch.arange(length)
    mask = torch.full((length, length), torch.finfo(q.dtype).min).triu(1)
    mask = mask * (torch.arange(length) > position.reshape(-1, 1))
    mask = mask[None, None].expand(q.shape[0], 1, -1, -1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def filled_in_forward(self, q, k, v):
    import torch

    length = q.shape[2]
    keep = torch.tril(torch.ones(length, length, dtype=torch.bool))
    weights = (q @ k.transpose(-1, -2) * 0.5).masked_fill(~keep, torch.finfo(q.dtype).min)
    return torch.softmax(weights, -1) @ v


@pytest.mark.parametrize("forward", [masked_in_forward, filled_in_forward])
@pytest.mark.parametrize("dynamic", [False, True])
def test_causal_masks_computed_in_the_model(forward, dynamic):
    import torch

    length = torch.export.Dim("T", min=2, max=64)
    shapes = {"args": tuple({2: length} for _ in range(3))} if dynamic else None
    other = [qkv(length=7)] if dynamic else None
    found, _ = recognised(module(forward), *qkv(), dynamic_shapes=shapes, other=other)
    assert [(kind, f["mask"]) for kind, f, _ in found] == [("attention", "causal")]


@pytest.mark.parametrize("persistent", [True, False])
def test_gpt2_keeps_its_triangle_in_a_buffer(persistent):
    """A buffer is imported as a constant: the part that is cut out of it is proved causal."""
    import torch

    def forward(self, q, k, v):
        rows, columns = q.shape[2], k.shape[2]
        keep = self.triangle[:, :, columns - rows : columns, :columns]
        weights = q @ k.transpose(-1, -2) * 0.5
        weights = torch.where(keep, weights, torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype))
        return torch.softmax(weights, -1) @ v

    built = module(forward)
    built.register_buffer("triangle", torch.ones(1, 1, 16, 16, dtype=torch.bool).tril(), persistent=persistent)
    found, _ = recognised(built, *qkv())
    assert [(f["mask"], f["mask_form"], float(f["fill"])) for _, f, _ in found] == [
        ("causal", "keep", torch.finfo(torch.float32).min)
    ]


# feed-forward


def acts():
    import torch
    from torch.nn import functional as F

    return {
        "silu": F.silu,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "gelu_tanh spelled": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3.0)))),
        "gelu spelled": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    }


NAMES = ["silu", "relu", "gelu", "gelu_tanh", "quick_gelu", "gelu_tanh spelled", "gelu spelled"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gated", [True, False])
def test_feed_forward(name, gated):
    from torch import nn

    act = acts()[name]

    def forward(self, x):
        return self.down(act(self.gate(x)) * self.up(x)) if gated else self.down(act(self.up(x)))

    layers = {"gate": nn.Linear(8, 12, bias=False)} if gated else {}
    built = module(forward, **layers, up=nn.Linear(8, 12, bias=not gated), down=nn.Linear(12, 8, bias=not gated))
    ((kind, facts, params),), outside = recognised(built, rand(2, 3, 8))
    assert kind == ("gated_mlp" if gated else "mlp") and facts["activation"] == name.split()[0] and not outside
    assert params == (["x", "gate", "up", "down"] if gated else ["x", "up", "up_bias", "down", "down_bias"])


def test_phi_packs_gate_and_up():
    from torch import nn

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(up * nn.functional.silu(gate))

    built = module(forward, both=nn.Linear(8, 24, bias=False), down=nn.Linear(12, 8, bias=False))
    ((kind, facts, params),), _ = recognised(built, rand(2, 3, 8))
    assert (kind, facts["packed"], params) == ("gated_mlp", "gate-up", ["x", "packed", "down"])


def test_gpt2_block_of_conv1d():
    import torch

    def conv(x, weight, bias):
        return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.shape[1])

    def forward(self, x):
        return conv(acts()["gelu_tanh spelled"](conv(x, self.a, self.ab)), self.d, self.db)

    state = {"a": rand(8, 12), "ab": rand(12), "d": rand(12, 8), "db": rand(8)}
    length = torch.export.Dim("T", min=2, max=64)
    found, outside = recognised(
        module(forward, **state),
        rand(1, 3, 8),
        dynamic_shapes={"args": ({1: length},)},
        other=[(rand(1, 6, 8, seed=4),)],
    )
    assert [name for name, *_ in found] == ["mlp"] and not outside


def test_embedding_and_linear():
    import torch
    from torch import nn

    built = module(lambda self, ids: self.head(self.embed(ids)), embed=nn.Embedding(7, 8), head=nn.Linear(8, 6))
    found, outside = recognised(built, torch.tensor([[1, 2, 6]]))
    assert sorted(name for name, *_ in found) == ["embedding", "linear"] and set(outside) <= {"relax.astype"}
