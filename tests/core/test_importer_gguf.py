"""from_gguf: blocks against gguf's own code, decoders against numpy, damaged files refused."""

from __future__ import annotations

import gc
from pathlib import Path

import gguf
import numpy as np
import pytest

from crossloom.errors import UnsupportedModel, UsageError
from crossloom.importers.compose import compose
from crossloom.importers.gguf import from_gguf
from crossloom.importers.gguf_quant import TYPES, dequantize
from crossloom.importers.gguf_reader import read_gguf
from crossloom.importers.specialize import specialize
from crossloom.testing import run_module

L, D, F, H, KV, V = 2, 64, 96, 4, 2, 40
DH = D // H


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_dequantized_bit_for_bit(qtype):
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[qtype]
    stored = gguf.quants.quantize(rng.standard_normal((6, 64)).astype("float32"), kind).view(np.uint8)
    wanted = gguf.quants.dequantize(stored, kind)
    np.testing.assert_array_equal(dequantize(stored, qtype).view(np.uint32), wanted.view(np.uint32).reshape(-1))
    assert TYPES[qtype][0] == int(kind)


def test_nibble_order_of_a_block_written_by_hand():
    block = np.concatenate([np.array([0.5, 1.0], "<f2").view(np.uint8), np.arange(16, dtype=np.uint8) | 0x30])
    wanted = np.concatenate([np.arange(16) * 0.5 + 1, np.full(16, 2.5)]).astype("float32")
    np.testing.assert_array_equal(dequantize(block, "Q4_1"), wanted)
    q4_0 = np.concatenate([block[:2], block[4:]])
    np.testing.assert_array_equal(dequantize(q4_0, "Q4_0"), (wanted - 1) - 4)


def write(path: Path, arch="llama", qtype="F32", *, skip=(), keys=None, tied=False, factors=False, extra=None):
    """Write a random decoder; return its weights as stored, dequantized by the gguf package."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "block_count": L,
        "embedding_length": D,
        "feed_forward_length": F,
        "context_length": 128,
        "attention.head_count": H,
        "attention.head_count_kv": KV,
        **(keys or {}),
    }
    for key, value in values.items():
        if key not in skip:
            writer.add_string(f"{arch}.{key}", value) if isinstance(value, str) else writer.add_uint32(
                f"{arch}.{key}", value
            )
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500.0)
    if keys and "rope.scaling.type" in keys:
        writer.add_float32(f"{arch}.rope.scaling.factor", 4.0)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    shapes = {"token_embd.weight": (V, D), "output_norm.weight": (D,)}
    if not tied:
        shapes["output.weight"] = (V, D)
    for i in range(L):
        rows = {"attn_q": (D, D), "attn_k": (KV * DH, D), "attn_v": (KV * DH, D), "attn_output": (D, D)}
        rows |= {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
        shapes |= {f"blk.{i}.{k}.weight": s for k, s in rows.items()}
        shapes |= {f"blk.{i}.{k}.weight": (D,) for k in ("attn_norm", "ffn_norm")}
        if arch == "qwen2":
            shapes |= {f"blk.{i}.attn_{k}.bias": (rows[f"attn_{k}"][0],) for k in "qkv"}
        if arch == "qwen3":
            shapes |= {f"blk.{i}.attn_{k}_norm.weight": (DH,) for k in "qk"}
    if factors:
        shapes["rope_freqs.weight"] = (DH // 2,)
    out = {}
    for key, shape in {**shapes, **(extra or {})}.items():
        if key in skip:
            continue
        array = (rng.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype("float32")
        if key == "rope_freqs.weight":
            array = np.linspace(1, 8, DH // 2).astype("float32")
        kind = gguf.GGMLQuantizationType[qtype if len(shape) == 2 else "F32"]
        stored = gguf.quants.quantize(array, kind)
        writer.add_tensor(key, stored, raw_dtype=kind)
        out[key] = gguf.quants.dequantize(stored, kind).reshape(shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def forward(w, ids, arch, divide=1.0):
    """Logits of every position and the caches, in plain numpy, complex numbers for the rotation."""
    norm = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g
    x = w["token_embd.weight"][ids].astype(np.float64)
    n = len(ids)
    turn = np.exp(1j * np.arange(n)[:, None] * 500.0 ** (-np.arange(DH // 2) * 2 / DH) / divide)[:, None]

    def rotate(t):
        if arch == "llama":
            z = (t[..., 0::2] + 1j * t[..., 1::2]) * turn
            return np.stack([z.real, z.imag], -1).reshape(t.shape)
        z = (t[..., : DH // 2] + 1j * t[..., DH // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    keys, values = [], []
    for i in range(L):
        g = lambda k, i=i: w[f"blk.{i}.{k}.weight"]
        h = norm(x, g("attn_norm"))
        q, k, v = ((h @ g(f"attn_{p}").T + w.get(f"blk.{i}.attn_{p}.bias", 0.0)).reshape(n, -1, DH) for p in "qkv")
        if arch == "qwen3":
            q, k = norm(q, g("attn_q_norm")), norm(k, g("attn_k_norm"))
        q, k = rotate(q), rotate(k)
        keys.append(k.transpose(1, 0, 2)[None])
        values.append(v.transpose(1, 0, 2)[None])
        out = np.zeros_like(q)
        for head in range(H):
            s = q[:, head] @ k[:, head // (H // KV)].T / np.sqrt(DH)
            s = np.where(np.tril(np.ones((n, n), bool)), s, -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, head // (H // KV)]
        x = x + out.reshape(n, -1) @ g("attn_output").T
        h = norm(x, g("ffn_norm"))
        gate = h @ g("ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ g("ffn_up").T)) @ g("ffn_down").T
    head = w.get("output.weight", w["token_embd.weight"])
    return norm(x, w["output_norm.weight"]) @ head.T, np.stack(keys), np.stack(values)


CASES = {
    "llama": ({}, 1.0),
    "llama-q8": ({"qtype": "Q8_0"}, 1.0),
    "llama-q4-tied": ({"qtype": "Q4_0", "tied": True}, 1.0),
    "llama-linear": ({"keys": {"rope.scaling.type": "linear"}}, 4.0),
    "llama-factors": ({"factors": True}, np.linspace(1, 8, DH // 2).astype("float32")),
    "qwen2": ({"arch": "qwen2", "qtype": "F16"}, 1.0),
    "qwen3": ({"arch": "qwen3", "qtype": "Q4_1"}, 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_decoder_equals_numpy(tmp_path, case):
    options, divide = CASES[case]
    arch = options.get("arch", "llama")
    weights = write(tmp_path / "m.gguf", **options)
    model = from_gguf(tmp_path / "m.gguf")
    for key, array in model.params.items():
        np.testing.assert_array_equal(array, weights[key])
    assert model.entries["prefill"].upper_bounds == {"T": 128}
    assert model.entries["decode"].outputs[1].shape == (L, 1, KV, "P + 1", DH)
    stored = options.get("qtype", "F32")
    assert ("blk.0.attn_q.weight" in model.packed) == (stored != "F32") and "output_norm.weight" not in model.packed

    def call(entry, *inputs):
        assert int(model.mod[entry].attrs["num_input"]) == len(inputs)
        return run_module(model.mod, entry, [*inputs, *model.entry_params(entry)])

    ids = np.random.default_rng(1).integers(0, V, 9)
    logits, keys, values = forward(weights, ids, arch, divide)
    n = 7
    embeds = call("embed", ids[None, :n])[0]
    mask = np.triu(np.full((n, n), -1e9, "float32"), 1)[None, None]
    out = call("prefill", embeds, mask, np.arange(n)[None])
    np.testing.assert_allclose(out[0][0, 0], logits[n - 1], atol=1e-4, rtol=1e-4)
    for step in range(n, len(ids)):
        mask = np.zeros((1, 1, 1, step + 1), "float32")
        out = call("decode", ids[None, step : step + 1], mask, np.array([[step]]), out[1], out[2])
        np.testing.assert_allclose(out[0][0, 0], logits[step], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(out[1], keys, atol=1e-4)
    np.testing.assert_allclose(out[2], values, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ("context_length",)}, "llama.context_length"),
        ({"skip": ("blk.1.ffn_up.weight",)}, "blk.1.ffn_up.weight"),
        ({"keys": {"feed_forward_length": 32}}, "blk.0.ffn_gate.weight"),
        ({"keys": {"expert_count": 8}}, "expert_count"),
        ({"keys": {"rope.scaling.type": "yarn"}}, "yarn"),
        ({"extra": {"blk.0.odd.weight": (4, 4)}}, "blk.0.odd.weight"),
        ({"arch": "mamba"}, "mamba"),
    ],
)
def test_wrong_models_are_named(tmp_path, options, message):
    write(tmp_path / "m.gguf", **options)
    with pytest.raises(UnsupportedModel, match=message):
        from_gguf(tmp_path / "m.gguf")


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write(path)
    good = path.read_bytes()
    for cut in [0, 3, 10, 23, 24, 60, 200, 600, 1500, len(good) // 2, len(good) - 64]:
        path.write_bytes(good[:cut])
        with pytest.raises(UnsupportedModel, match="truncated"):
            read_gguf(path)
    for data, message in (
        (b"GGML" + good[4:], "bad magic"),
        (good[:4] + b"\x01" + good[5:], "version 1"),
        (good[:8] + b"\xff" * 8 + good[16:], "m.gguf"),
    ):
        path.write_bytes(data)
        with pytest.raises(UnsupportedModel, match=message):
            read_gguf(path)
    at = good.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    path.write_bytes(good[:at] + b"\x0c\x00\x00\x00" + good[at + 4 :])
    with pytest.raises(UnsupportedModel, match=r"token_embd\.weight.* type 12"):
        read_gguf(path)
    with pytest.raises(UsageError):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(UsageError, match="'vision'"):
        from_gguf(path, entries=("vision",))


def test_ids_out_of_range_read_the_nearest_row(tmp_path, capfd):
    gc.collect()  # what earlier tests left for TVM to warn of
    capfd.readouterr()
    weights = write(tmp_path / "m.gguf")
    model = from_gguf(tmp_path / "m.gguf", entries=("embed",))
    ids = np.array([[0, V - 1, V, -1, 2**31, -(2**31)]])
    out = run_module(model.mod, "embed", [ids, *model.entry_params("embed")])[0]
    np.testing.assert_array_equal(out[0], weights["token_embd.weight"][[0, V - 1, V - 1, 0, V - 1, 0]])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("qtype", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_stored_blocks_stay_with_the_model_through_compose_and_specialize(tmp_path, qtype):
    write(tmp_path / "m.gguf", qtype=qtype)
    file = read_gguf(tmp_path / "m.gguf")
    model = from_gguf(tmp_path / "m.gguf")
    composed = specialize(compose({"lm": model}, {"embed": ["lm"], "decode": ["lm"]}), {"decode.P": 3})
    assert len(composed.packed) == len(model.packed) == 7 * L + 2
    for name, packed in composed.packed.items():
        tensor = file.tensors[name.removeprefix("lm.")]
        assert (packed.qtype, packed.shape) == (qtype, tensor.shape)
        np.testing.assert_array_equal(packed.data, tensor.data)
        np.testing.assert_array_equal(dequantize(packed.data, qtype).reshape(packed.shape), composed.params[name])
