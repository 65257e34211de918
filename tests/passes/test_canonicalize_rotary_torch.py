"""Rotary embeddings as Hugging Face spells them, exported by torch: each recognised, with what its tables hold."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from crossloom.errors import UnsupportedModel
from crossloom.importers.torch import from_torch
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.testing import run_module
from crossloom.verdict import Ledger

torch = pytest.importorskip("torch", reason="run in .venv-torch by `make test`")
pytestmark = pytest.mark.torch
nn = torch.nn


def inverse(dim, theta=10000.0):
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class Llama(nn.Module):
    """LlamaRotaryEmbedding and apply_rotary_pos_emb, with attention scaling."""

    def __init__(self, dim=16, theta=10000.0, scaling=1.0, computed=False):
        super().__init__()
        self.dim, self.theta, self.scaling, self.computed = dim, theta, scaling, computed
        if not computed:
            self.register_buffer("inv_freq", inverse(dim, theta))

    def tables(self, x, ids):
        freq = inverse(self.dim, self.theta) if self.computed else self.inv_freq
        wide = freq[None, :, None].float().expand(ids.shape[0], -1, 1)
        freqs = (wide @ ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return (emb.cos() * self.scaling).to(x.dtype), (emb.sin() * self.scaling).to(x.dtype)

    def forward(self, q, k, ids):
        cos, sin = (t.unsqueeze(1) for t in self.tables(q, ids))
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Einsum(Llama):
    """Older Llama: a cache by einsum, read by position ids."""

    def forward(self, q, k, ids):
        t = torch.arange(64, dtype=torch.float32)
        freqs = torch.einsum("i,j->ij", t, inverse(self.dim))
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos()[ids].unsqueeze(1), emb.sin()[ids].unsqueeze(1)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class NeoX(Llama):
    """GPT-NeoX and Phi: the first lanes turn, the rest pass."""

    def forward(self, q, k, ids):
        cos, sin = (t.unsqueeze(1) for t in self.tables(q, ids))
        r = cos.shape[-1]
        out = []
        for x in (q, k):
            turned, rest = x[..., :r], x[..., r:]
            out.append(torch.cat((turned * cos + rotate_half(turned) * sin, rest), dim=-1))
        return tuple(out)


class GPTJ(nn.Module):
    """GPT-J: x (batch, seq, heads, dim), a cache [sin | cos] read by position, repeat_interleave."""

    def __init__(self, rotary=8):
        super().__init__()
        self.rotary = rotary
        angle = torch.einsum("i,j->ij", torch.arange(64).float(), inverse(rotary))
        table = torch.cat((torch.sin(angle), torch.cos(angle)), dim=1)
        self.register_buffer("embed_positions", table)

    def forward(self, q, k, ids):
        table = self.embed_positions.repeat(ids.shape[0], 1, 1)
        rows = torch.gather(table, 1, ids.unsqueeze(-1).repeat(1, 1, table.shape[-1]))
        sin, cos = torch.split(rows, rows.shape[-1] // 2, dim=-1)
        sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
        cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
        out = []
        for x in (q, k):
            turned, rest = x[..., : self.rotary], x[..., self.rotary :]
            out.append(torch.cat((turned * cos + rotate_every_two(turned) * sin, rest), dim=-1))
        return tuple(out)


class Vision(nn.Module):
    """Qwen2-VL's vision tower: q (tokens, heads, dim), angles of (row, column) ids side by side."""

    def __init__(self, dim=16, computed=False):
        super().__init__()
        self.dim, self.computed = dim, computed
        self.register_buffer("inv_freq", inverse(dim // 2))

    def forward(self, q, k, ids):
        freq = inverse(self.dim // 2) if self.computed else self.inv_freq
        full = torch.outer(torch.arange(32, dtype=torch.float32), freq)
        angles = full[ids].flatten(1)
        emb = torch.cat((angles, angles), dim=-1)
        cos, sin = emb.cos().unsqueeze(-2).float(), emb.sin().unsqueeze(-2).float()
        out = []
        for x in (q, k):
            f = x.float()
            out.append((f * cos + rotate_half(f) * sin).to(x.dtype))
        return tuple(out)


class Multimodal(nn.Module):
    """Qwen2-VL's text model: ids (3, batch, seq), sections of pairs by time, height, width."""

    def __init__(self, dim=16, sections=(2, 3, 3), computed=False):
        super().__init__()
        self.dim, self.sections, self.computed = dim, list(sections), computed
        self.register_buffer("inv_freq", inverse(dim, 1000000.0))

    def freqs(self, ids):
        freq = inverse(self.dim, 1000000.0) if self.computed else self.inv_freq
        wide = freq[None, None, :, None].float().expand(3, ids.shape[1], -1, 1)
        return (wide @ ids[:, :, None, :].float()).transpose(2, 3)

    def tables(self, ids):
        freqs = self.freqs(ids)
        emb = torch.cat((freqs, freqs), dim=-1)
        twice = self.sections * 2
        return [
            torch.cat([m[i % 3] for i, m in enumerate(t.split(twice, dim=-1))], dim=-1).unsqueeze(1)
            for t in (emb.cos(), emb.sin())
        ]

    def forward(self, q, k, ids):
        cos, sin = self.tables(ids)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Interleaved(Multimodal):
    """Qwen3-VL: frequencies of height and width strewn into those of time, in place."""

    def tables(self, ids):
        freqs = self.freqs(ids)
        mixed = freqs[0].clone()
        for axis, offset in enumerate((1, 2), start=1):
            where = slice(offset, self.sections[axis] * 3, 3)
            mixed[..., where] = freqs[axis, ..., where]
        emb = torch.cat((mixed, mixed), dim=-1)
        return emb.cos().unsqueeze(1), emb.sin().unsqueeze(1)


class Where(Multimodal):
    """The same by a mask of lanes."""

    def tables(self, ids):
        freqs = self.freqs(ids)
        lane = torch.arange(self.dim // 2) % 3
        mixed = torch.where(lane == 1, freqs[1], torch.where(lane == 2, freqs[2], freqs[0]))
        emb = torch.cat((mixed, mixed), dim=-1)
        return emb.cos().unsqueeze(1), emb.sin().unsqueeze(1)


class DeepSeek(Llama):
    """DeepSeek-V2: interleaved pairs are brought into halves first."""

    def forward(self, q, k, ids):
        q, k = (x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).reshape(x.shape) for x in (q, k))
        return super().forward(q, k, ids)


class Unbound(Llama):
    """ChatGLM: pairs as a last axis of two."""

    def forward(self, q, k, ids):
        cos, sin = (t[..., : self.dim // 2].unsqueeze(1) for t in self.tables(q, ids))
        out = []
        for x in (q, k):
            pair = x.reshape(*x.shape[:-1], -1, 2)
            even, odd = pair[..., 0], pair[..., 1]
            out.append(torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(3))
        return tuple(out)


class Complex(nn.Module):
    """Llama's reference code: pairs as complex numbers."""

    def forward(self, q, k, ids):
        angle = torch.outer(ids[0].float(), inverse(16))
        turn = torch.polar(torch.ones_like(angle), angle)
        z = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
        return torch.view_as_real(z * turn).flatten(3)


# What the importer makes of them


def half(n, *, seed=0, heads=4, dim=16):
    torch.manual_seed(seed)
    return torch.randn(2, heads, n, dim), torch.randn(2, 2, n, dim)


def rows_first(n):
    torch.manual_seed(1)
    return torch.randn(2, n, 4, 16), torch.randn(2, n, 4, 16)


def patches(n):
    torch.manual_seed(2)
    return torch.randn(n, 4, 16), torch.randn(n, 4, 16)


def ids(*shape, top=30):
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(3))


ONE_D = {"axes": "1d", "sections": [8], "theta": 1e4, "scale": 1.0, "convention": "half-split", "rotary_dim": 16}
MROPE = {"axes": "mrope", "theta": 1e6, "scale": 1.0, "convention": "half-split", "rotary_dim": 16}
SPELLINGS = {
    "llama": (Llama, {}, half, lambda n: ids(2, n), ONE_D),
    "llama-computed": (Llama, {"computed": True, "theta": 5e5}, half, lambda n: ids(2, n), {**ONE_D, "theta": 5e5}),
    "yarn-scaled": (Llama, {"scaling": 1.25}, half, lambda n: ids(2, n), {**ONE_D, "scale": 1.25}),
    "cache-by-einsum": (Einsum, {}, half, lambda n: ids(2, n), ONE_D),
    "neox-partial": (NeoX, {"dim": 8}, half, lambda n: ids(2, n), {**ONE_D, "sections": [4], "rotary_dim": 8}),
    "gpt-j": (
        GPTJ,
        {},
        rows_first,
        lambda n: ids(2, n),
        {**ONE_D, "sections": [4], "rotary_dim": 8, "convention": "interleaved"},
    ),
    "qwen2-vl-vision": (
        Vision,
        {},
        patches,
        lambda n: ids(n, 2),
        {**ONE_D, "axes": "2d", "sections": [4, 4], "pair_axis": [0, 0, 0, 0, 1, 1, 1, 1]},
    ),
    "qwen2-vl": (
        Multimodal,
        {},
        half,
        lambda n: ids(3, 2, n),
        {**MROPE, "sections": [2, 3, 3], "pair_axis": [0, 0, 1, 1, 1, 2, 2, 2]},
    ),
    "qwen2-vl-computed": (
        Multimodal,
        {"computed": True},
        half,
        lambda n: ids(3, 2, n),
        {**MROPE, "sections": [2, 3, 3]},
    ),
    "qwen3-vl": (Interleaved, {}, half, lambda n: ids(3, 2, n), {**MROPE, "pair_axis": [0, 1, 2, 0, 1, 2, 0, 1]}),
    "by-mask": (Where, {}, half, lambda n: ids(3, 2, n), {**MROPE, "pair_axis": [0, 1, 2, 0, 1, 2, 0, 1]}),
    "deepseek": (DeepSeek, {}, half, lambda n: ids(2, n), ONE_D),
    "chatglm": (Unbound, {}, half, lambda n: ids(2, n), {**ONE_D, "convention": "interleaved"}),
}


def token_axis(shape, n):
    return {axis: torch.export.Dim("s", min=2, max=64) for axis, size in enumerate(shape) if size == n}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling(spelling, dynamic):
    build, options, operands, positions, facts = SPELLINGS[spelling]
    module = build(**options).eval()
    n = 5
    args = (*operands(n), positions(n))
    shapes = {key: token_axis(a.shape, n) for key, a in zip(("q", "k", "ids"), args)} if dynamic else None
    model = from_torch(module, args, dynamic_shapes=shapes)
    with Ledger() as ledger:
        out = CanonicalizeTransformer()(model.mod)
    assert [v.code for v in ledger if v.rewrite == "rotary"] == ["fired", "fired"]
    tvm.ir.assert_structural_equal(CanonicalizeTransformer()(out), out)
    found = [composite_attrs(f) for _, f in out.functions_items() if composite_name(f) == "crossloom.rotary"]
    for attrs in found:
        assert attrs["pair_equal"]
        for key, want in facts.items():
            have = list(attrs[key]) if isinstance(want, list) else attrs[key]
            assert have == (pytest.approx(want, rel=1e-3) if isinstance(want, float) else want), key
        own = facts["theta"] ** (-np.arange(len(attrs["inv_freq"])) / len(attrs["inv_freq"]))
        if facts["axes"] != "2d":
            assert list(attrs["inv_freq"]) == pytest.approx(list(own), rel=1e-3)
    for length in (7, 2) if dynamic else (n,):
        args = (*operands(length), positions(length))
        with torch.no_grad():
            wanted = module(*args)
        got = run_module(out, "main", [*(a.numpy() for a in args), *model.entry_params("main")])
        for have, want in zip(got, wanted, strict=True):
            np.testing.assert_allclose(have, want.numpy(), atol=2e-5)


def test_half_precision_tables_keep_their_facts():
    q, k = (t.half() for t in half(5))
    model = from_torch(Llama(computed=True), (q, k, ids(2, 5)))
    out = CanonicalizeTransformer()(model.mod)
    (attrs,) = {str(a): a for a in _rotary(out)}.values()
    assert attrs["axes"] == "1d" and attrs["pair_equal"] and attrs["theta"] == pytest.approx(1e4, rel=1e-3)


def test_text_only_positions_of_a_multimodal_model_are_one_axis():
    class TextOnly(Multimodal):
        def forward(self, q, k, ids):
            return super().forward(q, k, ids[None].expand(3, *ids.shape))

    model = from_torch(TextOnly(), (*half(5), ids(2, 5)))
    for attrs in _rotary(CanonicalizeTransformer()(model.mod)):
        assert (attrs["axes"], list(attrs["sections"])) == ("1d", [8])


def test_one_token_is_no_constant_position():
    model = from_torch(Llama(), (*half(1), ids(2, 1)))
    found = _rotary(CanonicalizeTransformer()(model.mod))
    assert [(a["axes"], a["pair_equal"]) for a in found] == [("1d", True)] * len(found) and found


def test_complex_numbers_are_refused_by_the_importer():
    """TVM has no complex type; the importer names the operators."""
    with pytest.raises(UnsupportedModel, match="view_as_complex"):
        from_torch(Complex(), (*half(5), ids(2, 5)))


def _rotary(mod):
    return [composite_attrs(f) for _, f in mod.functions_items() if composite_name(f) == "crossloom.rotary"]
