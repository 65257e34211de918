"""from_torch against PyTorch itself; runs where PyTorch is installed."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from crossloom.errors import ToolchainMissing, UnsupportedModel, UsageError
from crossloom.importers.torch import from_torch
from crossloom.testing import run_module


def run(model, *inputs):
    entry = next(iter(model.entries))
    return run_module(model.mod, entry, [*inputs, *model.entry_params(entry)])


def check(module, *inputs, other=None, tolerance=1e-4, **options):
    """Import with `inputs`, compare with PyTorch on `other` (by default the same)."""
    import torch

    module = module.eval()
    model = from_torch(module, inputs, **options)
    for args in [inputs, *(other or [])]:
        with torch.no_grad():
            wanted = module(*args)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        got = run(model, *[a.numpy() for a in args])
        assert len(got) == len(wanted)
        for left, right in zip(got, wanted):
            np.testing.assert_allclose(left, right.numpy(), atol=tolerance, rtol=tolerance)
    return model


def attention(**options):
    import torch

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, *mask):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, *mask, **options)

    return Attention()


def qkv(heads=4, kv=4, rows=5, columns=7):
    import torch

    torch.manual_seed(0)
    return torch.randn(2, heads, rows, 8), torch.randn(2, kv, columns, 8), torch.randn(2, kv, columns, 8)


@pytest.mark.torch
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.7}, {"is_causal": True}, {"scale": 0.1, "is_causal": True}],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6)])
def test_attention_options(options, lengths):
    check(attention(**options), *qkv(rows=lengths[0], columns=lengths[1]))


@pytest.mark.torch
@pytest.mark.parametrize("options", [{}, {"scale": 2.0}, {"is_causal": True}], ids=str)
def test_grouped_heads(options):
    check(attention(enable_gqa=True, **options), *qkv(heads=6, kv=2))


@pytest.mark.torch
@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 5, 7), (1, 4, 1, 7)], ids=str)
def test_masks(shape):
    import torch

    q, k, v = qkv()
    check(attention(scale=0.5), q, k, v, torch.randn(shape))
    keep = torch.rand(shape) > 0.4
    keep[..., 0, :] = False
    check(attention(), q, k, v, keep)


@pytest.mark.torch
def test_llama_like_with_dynamic_length_and_tied_weights():
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 16)
            self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
            self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
            self.norm = nn.Parameter(torch.rand(16))
            self.head = nn.Linear(16, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids, mask):
            x = self.embed(ids)
            h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norm
            split = lambda y: y.view(1, y.shape[1], -1, 4).transpose(1, 2)
            o = nn.functional.scaled_dot_product_attention(
                split(self.q(h)), split(self.k(h)), split(self.v(h)), mask, scale=0.3, enable_gqa=True
            )
            x = x + o.transpose(1, 2).reshape(1, -1, 16)
            return self.head(x + self.down(nn.functional.silu(self.gate(x)) * self.up(x)))

    torch.manual_seed(1)
    length = torch.export.Dim("T", min=2, max=64)
    inputs = lambda n: (torch.arange(n)[None] % 11, torch.full((n, n), -1e9).triu(1)[None, None])
    model = check(
        Block(),
        *inputs(6),
        other=[inputs(9)],
        dynamic_shapes={"ids": {1: length}, "mask": {2: length, 3: length}},
    )
    entry = model.entries["main"]
    assert ("embed.weight" in model.params) != ("head.weight" in model.params), "tied weights are kept once"
    assert len(entry.weights) == len(set(entry.weights)) == len(model.params)
    assert list(entry.upper_bounds.values()) == [64]
    assert int(model.mod["main"].attrs["num_input"]) == 2


@pytest.mark.torch
def test_vit_and_whisper_like_encoders():
    import torch
    from torch import nn

    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, 16, 4, 4)
            self.position = nn.Parameter(torch.randn(1, 9, 16))
            self.norm, self.qkv, self.fc = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, image):
            x = self.patch(image).flatten(2).transpose(1, 2) + self.position
            q, k, v = self.qkv(self.norm(x)).view(1, 9, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, 9, 16)
            return x + nn.functional.gelu(self.fc(x))

    class Audio(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, stride=2, padding=1)
            self.register_buffer("position", torch.randn(5, 16))
            self.layer = nn.Linear(16, 16)

        def forward(self, mel):
            x = nn.functional.gelu(self.conv2(nn.functional.gelu(self.conv1(mel)))).transpose(1, 2) + self.position
            h = self.layer(x).view(1, 5, 2, 8).transpose(1, 2)
            return x + nn.functional.scaled_dot_product_attention(h, h, h).transpose(1, 2).reshape(1, 5, 16), h

    torch.manual_seed(2)
    check(Vision(), torch.randn(1, 3, 12, 12), modality="image", entry="vision")
    check(Audio(), torch.randn(1, 8, 10), modality="audio", entry="audio")


def half(*tensors):
    return [t.half() for t in tensors]


@pytest.mark.torch
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"enable_gqa": True, "scale": 0.3}], ids=str)
def test_masks_of_minus_infinity(options):
    """Rows that keep something; the fully masked row is zeros for boolean masks and NaN for float ones in PyTorch."""
    import torch

    q, k, v = qkv(heads=4, kv=2 if options.get("enable_gqa") else 4)
    mask = torch.zeros(5, 7).masked_fill(torch.rand(5, 7) > 0.6, float("-inf"))
    mask[:, 0] = 0.0
    check(attention(**options), q, k, v, mask)
    check(attention(**options), q, k, v, torch.full((2, 1, 5, 7), -1e9) * (torch.rand(2, 1, 5, 7) > 0.5))


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["float", "bool"])
@pytest.mark.parametrize("lengths", [(6, 6), (3, 7), (7, 3)])
def test_mask_and_causal_together(kind, lengths):
    """PyTorch's documentation forbids both at once and its CPU kernels apply both; the mask here keeps column 0."""
    import torch

    q, k, v = qkv(rows=lengths[0], columns=lengths[1])
    mask = torch.randn(*lengths) if kind == "float" else torch.rand(*lengths) > 0.3
    if kind == "bool":
        mask[:, 0] = True

    class Both(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=True)

    wanted_mask = torch.ones(*lengths, dtype=torch.bool).tril()
    bias = mask if kind == "float" else torch.zeros(*lengths).masked_fill(~mask, float("-inf"))
    wanted = attention()(q, k, v, bias.masked_fill(~wanted_mask, float("-inf")))
    try:
        model = from_torch(Both(), (q, k, v, mask))
    except UnsupportedModel as error:
        assert "attn_mask" in str(error) or "is_causal" in str(error)  # PyTorch's own refusal, passed on
        return
    got = run(model, *[t.numpy() for t in (q, k, v, mask)])[0]
    np.testing.assert_allclose(got, wanted.numpy(), atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True, "scale": 0.2}], ids=str)
def test_attention_in_half_precision(options):
    heads = 2 if options.get("enable_gqa") else 4
    check(attention(**options), *half(*qkv(kv=heads)), tolerance=4e-3)


@pytest.mark.torch
def test_half_precision_scores_beyond_its_range():
    """Scores of q.k in fp16 overflow before the scale; PyTorch accumulates in float32."""
    q, k, v = qkv(rows=3, columns=4)
    check(attention(scale=0.01), *half(q * 60, k * 60, v), tolerance=1e-2)


@pytest.mark.torch
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_attention_that_arrives_decomposed(options):
    """A program decomposed before it was handed over: matmul, softmax and the guards of -inf rows."""
    import torch

    inputs = qkv()
    module = attention(**options)
    program = torch.export.export(module, inputs).run_decompositions()
    assert all("scaled_dot_product" not in str(node.target) for node in program.graph.nodes)
    got = run(from_torch(program), *[t.numpy() for t in inputs])[0]
    np.testing.assert_allclose(got, module(*inputs).numpy(), atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_dynamic_lengths_down_to_one(options):
    import torch

    length = torch.export.Dim("n", min=1, max=32)

    class Block(torch.nn.Module):
        def forward(self, x):
            y = x.view(1, x.shape[1], 2, 8).transpose(1, 2)
            y = torch.nn.functional.scaled_dot_product_attention(y, y, y, **options)
            return y.transpose(1, 2).reshape(1, -1, 16)

    make = lambda n: (torch.randn(1, n, 16),)
    model = check(Block(), *make(5), other=[make(1), make(2), make(32)], dynamic_shapes={"x": {1: length}})
    assert list(model.entries["main"].upper_bounds.values()) == [32]


@pytest.mark.torch
def test_slices_of_a_dynamic_length_have_simple_sizes():
    import torch

    class Slices(torch.nn.Module):
        def forward(self, x):
            return x[:, -1:], x[:, :-1] + x[:, 1:], x[:, 2:6:2]

    length = torch.export.Dim("T", min=8, max=64)
    make = lambda n: (torch.randn(1, n, 4),)
    model = check(Slices(), *make(12), other=[make(8), make(9)], dynamic_shapes={"x": {1: length}})
    entry = model.entries["main"]
    name = entry.inputs[0].shape[1]
    assert [o.shape[1] for o in entry.outputs] == [1, f"{name} - 1", 2]
    assert entry.lower_bounds == {name: 8} and entry.upper_bounds == {name: 64}


@pytest.mark.torch
def test_constants_and_buffers_that_are_not_saved():
    import torch

    class Constants(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(4), persistent=False)

        def forward(self, x):
            return x + self.table, x * torch.tensor([1.0, 2.0, 3.0, 4.0])

    check(Constants(), torch.randn(3, 4))


@pytest.mark.torch
def test_a_refused_range_says_which_would_do():
    import torch

    class Fixed(torch.nn.Module):
        def forward(self, x):
            return x[:, 1:5]

    length = torch.export.Dim("T", min=2, max=64)
    with pytest.raises(UnsupportedModel, match=r"min=5"):
        from_torch(Fixed(), (torch.randn(1, 6),), dynamic_shapes={"x": {1: length}})


@pytest.mark.torch
def test_files_and_refusals(tmp_path):
    import torch

    module = torch.nn.Linear(3, 2)
    program = torch.export.export(module, (torch.randn(4, 3),))
    torch.export.save(program, tmp_path / "m.pt2")
    x = torch.randn(4, 3)
    for source in (program, tmp_path / "m.pt2"):
        out = run(from_torch(source), x.numpy())[0]
        np.testing.assert_allclose(out, module(x).detach().numpy(), atol=1e-5)
    torch.save(module.state_dict(), tmp_path / "m.pt")
    with pytest.raises(UsageError, match="runs code"):
        from_torch(tmp_path / "m.pt")
    (tmp_path / "bad.pt2").write_bytes(b"PK nonsense")
    with pytest.raises(UnsupportedModel, match=r"bad\.pt2"):
        from_torch(tmp_path / "bad.pt2")

    class Odd(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.svd(x)[0]

    with pytest.raises(UnsupportedModel, match="svd"):
        from_torch(Odd(), (torch.randn(3, 3),))


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["dropout", "svd"])
def test_a_refused_program_leaves_nothing_on_stderr(kind, capfd):
    """Refused by our converter with a block open, and by TVM before it opens one."""
    import torch

    class Refused(torch.nn.Module):
        def forward(self, x):
            x = torch.relu(x)
            if kind == "dropout":
                return torch.nn.functional.scaled_dot_product_attention(x, x, x, None, 0.5)
            return torch.linalg.svd(x)[0]

    gc.collect()
    capfd.readouterr()
    with pytest.raises(UnsupportedModel):
        from_torch(Refused(), (torch.randn(1, 2, 4, 4),))
    gc.collect()
    assert "BlockBuilder" not in capfd.readouterr().err


def test_missing_torch_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ToolchainMissing, match=r"crossloom\[torch\]"):
        from_torch("m.pt2")


@pytest.mark.torch
def test_one_tensor_as_two_example_inputs_is_two_inputs():
    import torch

    class Difference(torch.nn.Module):
        def forward(self, q, pair):
            return q - 2 * pair[0] + 3 * pair[1]

    x = torch.randn(2, 3)
    loaded = from_torch(Difference(), (x, (x, x)))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 3)).astype("float32") for _ in loaded.entries["main"].inputs]
    assert len(arrays) == 3
    (got,) = run_module(loaded.mod, "main", arrays)
    np.testing.assert_allclose(got, arrays[0] - 2 * arrays[1] + 3 * arrays[2], rtol=1e-6)


@pytest.mark.torch
def test_an_empty_tensor_of_one_dimension_joins_any():
    """A cache of keys begins so."""
    import torch

    class Cache(torch.nn.Module):
        def forward(self, x):
            kept = torch.tensor([])
            kept = torch.cat([kept, x], dim=-2)
            return torch.cat([kept, 2 * x], dim=-2), torch.cat([torch.zeros(0), torch.zeros(0)])

    check(Cache(), torch.randn(1, 2, 3, 4))
