"""Import Llama-family decoders from GGUF files.

``embed(input_ids (1, n)) -> (1, n, D)``; ``prefill(inputs_embeds (1, T, D), attention_mask (1, 1, T, T),
position_ids (1, T)) -> logits (1, 1, V) of the last position, present_key and present_value (L, 1, Hkv, T,
dh)``; ``decode(input_ids (1, 1), attention_mask (1, 1, 1, P + 1), position_ids (1, 1), past_key, past_value
(L, 1, Hkv, P, dh))`` returns the same for one token more.  Masks are float32 and added to the scores.  Ids
outside the vocabulary read its first or last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from ..errors import UnsupportedModel, UsageError
from ..model import Model, PackedWeight
from .gguf_decoder import DecoderBuilder, DecoderConfig
from .gguf_reader import GGUFFile, read_gguf
from .signature import entry_attributes, entry_of

ENTRIES = ("embed", "prefill", "decode")

# Architecture -> rotated pairs are (2i, 2i+1).  Converters reorder llama's q and k rows for that; not qwen's.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}


def from_gguf(path: str | Path, *, entries: Sequence[str] = ENTRIES, name: str | None = None) -> Model:
    """Import a decoder.

    Parameters
    ----------
    path : str or Path
    entries : sequence of str
        Some of ``embed``, ``prefill``, ``decode``.
    name : str, optional
        Of the model; by default the file's stem.

    Returns
    -------
    Model
        Weights float32 under their GGUF names; ``packed`` keeps the stored bytes and type of each one that
        the file does not store as float32.

    Raises
    ------
    UsageError
        The file cannot be opened, or an unknown entry is asked for.
    UnsupportedModel
        A damaged file, another architecture, a missing metadata key, a missing, misshapen or unknown tensor.
    """
    unknown = [entry for entry in entries if entry not in ENTRIES]
    if unknown or not entries:
        raise UsageError(f"no GGUF entry {unknown[0] if unknown else '(none)'!r}", f"entries: {', '.join(ENTRIES)}")
    file = read_gguf(path)
    config = _config(file)
    _check_tensors(file, config)
    shapes = {key: tensor.shape for key, tensor in file.tensors.items()}
    builder = DecoderBuilder(config, shapes)
    functions: dict[tvm.ir.GlobalVar, relax.Function] = {}
    described = {}
    for entry in dict.fromkeys(entries):
        function, inputs, weights, outputs = builder.build(entry, _inputs(entry, config))
        limits = {"n": config.context, "T": config.context, "P": config.context - 1}
        described[entry] = entry_of(
            function,
            entry,
            inputs,
            outputs,
            weights=weights,
            modality="text",
            upper_bounds=limits,
            lower_bounds={"T": 1},  # the logits are of the last position: there must be one
        )
        for attribute, value in entry_attributes(described[entry]).items():
            function = function.with_attr(attribute, value)
        functions[tvm.ir.GlobalVar(entry)] = function
    used = {weight for entry in described.values() for weight in entry.weights}
    params = {key: tensor.dequantize() for key, tensor in file.tensors.items() if key in used}
    packed = {
        # Copied out of the mapping: a file that changes on disk must not change the model.
        key: PackedWeight(tensor.qtype, tensor.shape, np.array(tensor.data))
        for key, tensor in file.tensors.items()
        if key in used and tensor.qtype != "F32"
    }
    mod = tvm.IRModule(functions)
    relax.analysis.well_formed(mod)
    label = name or file.path.stem
    return Model(mod, params, described, {label: "text"}, label, packed)


def _inputs(entry: str, c: DecoderConfig) -> list[tuple[str, tuple[Any, ...], str]]:
    size = lambda symbol: tirx.Var(symbol, "int64")
    if entry == "embed":
        return [("input_ids", (1, size("n")), "int64")]
    if entry == "prefill":
        length = size("T")
        return [
            ("inputs_embeds", (1, length, c.dim), "float32"),
            ("attention_mask", (1, 1, length, length), "float32"),
            ("position_ids", (1, length), "int64"),
        ]
    past = size("P")
    cache = (c.layers, 1, c.kv_heads, past, c.head_dim)
    return [
        ("input_ids", (1, 1), "int64"),
        ("attention_mask", (1, 1, 1, past + 1), "float32"),
        ("position_ids", (1, 1), "int64"),
        ("past_key", cache, "float32"),
        ("past_value", cache, "float32"),
    ]


def _config(file: GGUFFile) -> DecoderConfig:
    where = str(file.path)

    def get(key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = file.metadata.get(key, default)
        if value is None:
            raise UnsupportedModel(f"{where!r} lacks the metadata key {key!r}", "convert the file again")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UnsupportedModel(f"{where!r}: metadata {key!r} is {value!r}, which is not read")
        return value

    def size(key: str, default: int | None = None) -> int:
        value = int(get(f"{arch}.{key}", int, default))
        if value <= 0:
            raise UnsupportedModel(f"{where!r}: metadata '{arch}.{key}' is {value}, not positive")
        return value

    arch = get("general.architecture", str)
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{where!r} has architecture {arch!r}, which is not read", f"read are: {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get(f"{arch}.expert_count"):
        raise UnsupportedModel(f"{where!r}: '{arch}.expert_count' is set; mixtures of experts are not read")
    dim, heads = size("embedding_length"), size("attention.head_count")
    kv_heads = size("attention.head_count_kv", heads)
    head_dim = size("attention.key_length", dim // heads)
    if size("attention.value_length", head_dim) != head_dim or heads % kv_heads:
        raise UnsupportedModel(f"{where!r}: {heads} heads of {head_dim} over {kv_heads} key/value heads are not read")
    rotated = size("rope.dimension_count", head_dim)
    if rotated % 2 or rotated > head_dim:
        raise UnsupportedModel(f"{where!r}: '{arch}.rope.dimension_count' is {rotated}, a head has {head_dim}")
    base = float(get(f"{arch}.rope.freq_base", (int, float), 10000.0))
    frequency = base ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    scaling = get(f"{arch}.rope.scaling.type", str, "none")
    old_factor = file.metadata.get(f"{arch}.rope.scale_linear")
    if scaling == "linear" or old_factor:
        frequency = frequency / float(get(f"{arch}.rope.scaling.factor", (int, float), old_factor))
    elif scaling != "none":
        raise UnsupportedModel(f"{where!r}: rotary scaling {scaling!r} is not read", "read are: none, linear")
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.shape != frequency.shape:
            raise UnsupportedModel(f"{where!r}: 'rope_freqs.weight' is {factors.shape}, wanted {frequency.shape}")
        frequency = frequency / factors.dequantize()
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModel(f"{where!r} has no tensor 'token_embd.weight'", "convert the file again")
    return DecoderConfig(
        layers=size("block_count"),
        dim=dim,
        ffn_dim=size("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=embedding.shape[0],
        context=size("context_length"),
        eps=float(get(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        inverse_frequency=frequency.astype(np.float32),
        interleaved=ARCHITECTURES[arch],
    )


def _check_tensors(file: GGUFFile, c: DecoderConfig) -> None:
    """Check that every tensor is there, of the right shape, and that none is left over."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    needed = {"token_embd.weight": (c.vocab, c.dim), "output_norm.weight": (c.dim,)}
    optional = {"output.weight": (c.vocab, c.dim), "rope_freqs.weight": c.inverse_frequency.shape}
    rows: dict[str, tuple[int, int]] = {
        "attn_q": (q, c.dim),
        "attn_k": (kv, c.dim),
        "attn_v": (kv, c.dim),
        "attn_output": (c.dim, q),
        "ffn_gate": (c.ffn_dim, c.dim),
        "ffn_up": (c.ffn_dim, c.dim),
        "ffn_down": (c.dim, c.ffn_dim),
    }
    for layer in range(min(c.layers, len(file.tensors))):
        for part, shape in rows.items():
            needed[f"blk.{layer}.{part}.weight"] = shape
            optional[f"blk.{layer}.{part}.bias"] = shape[:1]
        for part in ("attn_norm", "ffn_norm"):
            needed[f"blk.{layer}.{part}.weight"] = (c.dim,)
        extra = needed if file.metadata["general.architecture"] == "qwen3" else {}
        for part in ("attn_q_norm", "attn_k_norm"):
            extra[f"blk.{layer}.{part}.weight"] = (c.head_dim,)
    for key in needed:
        if key not in file.tensors:
            raise UnsupportedModel(f"{str(file.path)!r} has no tensor {key!r}", "convert the file again")
    if c.layers > len(file.tensors):
        raise UnsupportedModel(f"{str(file.path)!r} says {c.layers} layers and has {len(file.tensors)} tensors")
    for key, tensor in file.tensors.items():
        wanted = needed.get(key, optional.get(key))
        if wanted is None:
            raise UnsupportedModel(f"{str(file.path)!r}: tensor {key!r} is not known in this architecture")
        if tensor.shape != wanted:
            raise UnsupportedModel(f"{str(file.path)!r}: tensor {key!r} is {tensor.shape}, wanted {wanted}")
