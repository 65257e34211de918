"""Real architectures with random weights, imported and written to files: ``python -m benchmarks.fusion_architectures``.

Runs in an environment with PyTorch and ``transformers``; :mod:`benchmarks.fusion` starts it as a process of its own and
reads what it wrote, so that measuring needs neither.  Layers are as the published models have them, only fewer and
narrower: what is counted does not depend on either.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import tvm
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from tvm import tirx

from crossloom.importers.compose import compose
from crossloom.importers.specialize import bind_entry
from crossloom.importers.torch import from_torch
from crossloom.model import Model

from .fusion_files import write_model

LAYERS, LONGEST, SEED = 3, 512, 0
_IDS = torch.ones((1, 5), dtype=torch.int64)
_PIXELS = torch.zeros((1, 3, 224, 224))


def _random(module: nn.Module) -> nn.Module:
    """Return a module with every parameter random: norms begin as ones and biases as zeros, all alike."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return module.eval()


class _Prefill(nn.Module):
    """A causal language model's first call: ids to logits and the keys and values of every layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor) -> Any:
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=DynamicCache(),
        )
        return out.logits, *(t for layer in out.past_key_values.layers for t in (layer.keys, layer.values))


class _Decode(nn.Module):
    """A causal language model's later calls: one id and what is kept of the others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past: Sequence[torch.Tensor],
    ) -> Any:
        cache = DynamicCache(list(zip(past[::2], past[1::2])))
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=cache
        )
        return out.logits, *(t for layer in out.past_key_values.layers for t in (layer.keys, layer.values))


class _Embedded(nn.Module):
    """A causal language model's first call from embeddings, for models of several modalities."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor) -> Any:
        out = self.model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=DynamicCache(),
        )
        return out.logits, *(t for layer in out.past_key_values.layers for t in (layer.keys, layer.values))


def _mask(queries: int, keys: int) -> torch.Tensor:
    return torch.zeros((1, 1, queries, keys))


def _prefill(lm: nn.Module) -> Model:
    tokens = torch.export.Dim("T", min=2, max=LONGEST)
    args = (_IDS, _mask(5, 5), torch.arange(5)[None])
    shapes = ({1: tokens}, {2: tokens, 3: tokens}, {1: tokens})
    return from_torch(_Prefill(lm), args, entry="prefill", dynamic_shapes=shapes, modality="text")


def _decode(lm: nn.Module, layers: int, heads: int, head_dim: int) -> Model:
    auto = torch.export.Dim.AUTO
    past = [torch.zeros((1, heads, 7, head_dim)) for _ in range(2 * layers)]
    args = (torch.ones((1, 1), dtype=torch.int64), _mask(1, 8), torch.tensor([[7]]), past)
    shapes: tuple[Any, ...] = ({}, {3: auto}, {}, [{2: auto}] * len(past))
    return _one_length(from_torch(_Decode(lm), args, entry="decode", dynamic_shapes=shapes, modality="text"))


def _one_length(model: Model) -> Model:
    """Return a model of one entry whose kept keys and values all have ``P`` positions.

    torch.export refuses to be told so: it cannot simplify a guard on strides.  Told nothing, it finds out of itself
    for keys, and leaves every value a length of its own.
    """
    (name,) = model.entries
    function, entry = model.mod[name], model.entries[name]
    own = [p.ty.shape[2] for p, s in zip(function.params, entry.inputs) if s.name.startswith("past")]
    function, entry = bind_entry(function, entry, dict.fromkeys(own, tirx.Var("P", "int64")))
    entry = replace(entry, upper_bounds={"P": LONGEST - 1})
    return replace(model, mod=tvm.IRModule({name: function}), entries={name: entry})


def _language_model(name: str, lm: nn.Module, heads: int, head_dim: int) -> Model:
    parts = {"prefill": _prefill(lm), "decode": _decode(lm, LAYERS, heads, head_dim)}
    return compose(parts, {key: [key] for key in parts}, name=name)


_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2 * LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> Model:
    """Llama 3: grouped heads, RMSNorm, SwiGLU, half-split rotation."""
    return _language_model("llama", _random(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL))), 2, 32)


def qwen2() -> Model:
    """Qwen2: as Llama, with biases on query, key and value, and tied embeddings."""
    config = transformers.Qwen2Config(**_SMALL, tie_word_embeddings=True)
    return _language_model("qwen2", _random(transformers.Qwen2ForCausalLM(config)), 2, 32)


def qwen3() -> Model:
    """Qwen3: queries and keys normed by head before the rotation; heads wider than hidden / heads."""
    config = transformers.Qwen3Config(**_SMALL, head_dim=64)
    return _language_model("qwen3", _random(transformers.Qwen3ForCausalLM(config)), 2, 64)


def phi3() -> Model:
    """Phi-3: query, key and value in one weight, gate and up in one weight."""
    sizes = {**_SMALL, "num_key_value_heads": 8}
    return _language_model("phi3", _random(transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes))), 8, 32)


class _QwenVision(nn.Module):
    """A Qwen-VL vision tower for one size of image; what depends on that size alone is computed here."""

    def __init__(self, tower: nn.Module, grid: tuple[int, int, int]) -> None:
        super().__init__()
        from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

        config, thw = tower.config, torch.tensor([grid])
        self.tower, self.grid = tower, thw
        self.positions = get_vision_position_ids(thw, config.spatial_merge_size)
        # Lengths are numbers, not tensors: what they cut is known when the model is exported.
        self.fixed: dict[str, Any] = {"cu_seqlens": np.asarray(get_vision_cu_seqlens(thw).tolist())}
        if hasattr(config, "window_size"):
            index, lengths = get_vision_window_index(
                thw, config.spatial_merge_size, config.window_size, config.patch_size
            )
            self.window, self.fixed["cu_window_seqlens"] = index, np.asarray(lengths.tolist())

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        window = {"window_index": self.window} if hasattr(self, "window") else {}
        out = self.tower(patches, self.grid, position_ids=self.positions, **window, **self.fixed)
        return out.pooler_output


def _qwen_vision(name: str, tower: nn.Module) -> Model:
    config, grid = tower.config, (1, 16, 16)
    channels = getattr(config, "in_channels", getattr(config, "in_chans", 3))
    pixels = channels * config.temporal_patch_size * config.patch_size**2
    patches = torch.zeros((grid[0] * grid[1] * grid[2], pixels))
    return _single(name, _QwenVision(_random(tower), grid), (patches,), "image")


def _single(name: str, module: nn.Module, args: tuple[Any, ...], modality: str, entry: str = "main") -> Model:
    model = from_torch(module, args, entry=entry, modality=modality)
    return compose({entry: model}, {entry: [entry]}, name=name)


def qwen2_vl_vision() -> Model:
    """Qwen2-VL's vision tower: LayerNorm, packed QKV, rotation by row and column, QuickGELU MLP, patch merger."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(depth=LAYERS, embed_dim=256, hidden_size=256, num_heads=8, mlp_ratio=4)
    return _qwen_vision("qwen2-vl vision", Qwen2VisionTransformerPretrainedModel(config))


def qwen25_vl_vision() -> Model:
    """Qwen2.5-VL's vision tower: RMSNorm, gated MLP with biases, windows but for one layer."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = Qwen2_5_VLVisionConfig(
        depth=LAYERS,
        hidden_size=256,
        intermediate_size=684,
        num_heads=8,
        out_hidden_size=256,
        fullatt_block_indexes=[LAYERS - 1],
    )
    return _qwen_vision("qwen2.5-vl vision", Qwen2_5_VisionTransformerPretrainedModel(config))


class _Last(nn.Module):
    """A tower's last hidden state."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x).last_hidden_state


class _Pooled(_Last):
    """A tower's pooled output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x).pooler_output


_TOWER: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
}


def clip() -> Model:
    """CLIP: vision tower (patches of 32, class token) and text tower (causal mask), QuickGELU."""
    vision = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_TOWER, image_size=224, patch_size=32))
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(**_TOWER, vocab_size=512, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    )
    return _two_towers("clip", vision, text, 77)


def siglip() -> Model:
    """SigLIP: vision tower with attention pooling and text tower without mask, GELU by tanh."""
    vision = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**_TOWER, image_size=224, patch_size=16))
    text = transformers.SiglipTextModel(
        transformers.SiglipTextConfig(**_TOWER, vocab_size=512, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    )
    return _two_towers("siglip", vision, text, 64)


def _two_towers(name: str, vision: nn.Module, text: nn.Module, tokens: int) -> Model:
    ids = torch.ones((1, tokens), dtype=torch.int64)
    parts = {
        "vision": from_torch(_Pooled(_random(vision)), (_PIXELS,), entry="vision", modality="image"),
        "text": from_torch(_Pooled(_random(text)), (ids,), entry="text", modality="text"),
    }
    return compose(parts, {key: [key] for key in parts}, name=name)


class _WhisperStep(nn.Module):
    """Whisper's decoder: ids, the encoder's states and the keys and values kept of earlier ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, states: torch.Tensor, past: Sequence[torch.Tensor]) -> Any:
        cache = EncoderDecoderCache(DynamicCache(list(zip(past[::2], past[1::2]))), DynamicCache())
        out = self.model.model.decoder(
            input_ids=input_ids, encoder_hidden_states=states, past_key_values=cache, use_cache=True
        )
        kept = out.past_key_values.self_attention_cache.layers
        return self.model.proj_out(out.last_hidden_state), *(t for layer in kept for t in (layer.keys, layer.values))


class _WhisperPrefill(nn.Module):
    """Whisper's decoder on the first ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, states: torch.Tensor) -> Any:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        out = self.model.model.decoder(
            input_ids=input_ids, encoder_hidden_states=states, past_key_values=cache, use_cache=True
        )
        kept = out.past_key_values.self_attention_cache.layers
        return self.model.proj_out(out.last_hidden_state), *(t for layer in kept for t in (layer.keys, layer.values))


def whisper() -> Model:
    """Whisper: encoder over 30 s of log-mel frames, decoder with cross-attention."""
    config = transformers.WhisperConfig(
        d_model=256,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        vocab_size=512,
        max_target_positions=448,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    model = _random(transformers.WhisperForConditionalGeneration(config))
    mel, states = torch.zeros((1, 80, 3000)), torch.zeros((1, 1500, 256))
    past = [torch.zeros((1, 8, 7, 32)) for _ in range(2 * LAYERS)]
    one, four = (torch.ones((1, n), dtype=torch.int64) for n in (1, 4))
    kept = torch.export.Dim.AUTO
    parts = {
        "encoder": from_torch(_Last(model.model.encoder), (mel,), entry="encoder", modality="audio"),
        "prefill": from_torch(_WhisperPrefill(model), (four, states), entry="prefill", modality="text"),
        "decode": _one_length(
            from_torch(
                _WhisperStep(model),
                (one, states, past),
                entry="decode",
                modality="text",
                dynamic_shapes=({}, {}, [{2: kept}] * len(past)),
            )
        ),
    }
    return compose(parts, {key: [key] for key in parts}, name="whisper")


class _Features(nn.Module):
    """What LLaVA reads of CLIP: the last layer's patches, without the class token."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.tower(pixels).last_hidden_state[:, 1:]


class _Embed(nn.Module):
    """Image features in front of the embedded text."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, features: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([features, self.table(input_ids)], dim=1)


class _Projector(nn.Module):
    """LLaVA 1.5's two linear layers with GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear_1, self.act, self.linear_2 = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.act(self.linear_1(features)))


def llava() -> Model:
    """LLaVA: CLIP's vision tower, a projector, and Llama, imported apart and composed into one prefill and decode."""
    vision = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_TOWER, image_size=224, patch_size=32))
    lm = _random(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL)))
    tokens, total = torch.export.Dim("T", min=2, max=LONGEST), torch.export.Dim("N", min=2, max=LONGEST)
    features, embedded = torch.zeros((1, 49, 256)), torch.zeros((1, 5, 256))
    parts = {
        "vision": from_torch(_Features(_random(vision)), (_PIXELS,), entry="vision", modality="image"),
        "projector": from_torch(_random(_Projector(256, 256)), (features,), entry="projector", modality="image"),
        "embed": from_torch(
            _Embed(lm.model.embed_tokens),
            (features, _IDS),
            entry="embed",
            dynamic_shapes=({}, {1: tokens}),
            modality="text",
        ),
        "language": from_torch(
            _Embedded(lm),
            (embedded, _mask(5, 5), torch.arange(5)[None]),
            entry="language",
            dynamic_shapes=({1: total}, {2: total, 3: total}, {1: total}),
            modality="text",
        ),
        "decode": _decode(lm, LAYERS, 2, 32),
    }
    chains = {"prefill": ["vision", "projector", "embed", "language"], "decode": ["decode"]}
    return compose(parts, chains, name="llava")


ARCHITECTURES: dict[str, Callable[[], Model]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "phi3": phi3,
    "qwen2-vl-vision": qwen2_vl_vision,
    "qwen2.5-vl-vision": qwen25_vl_vision,
    "clip": clip,
    "siglip": siglip,
    "whisper": whisper,
    "llava": llava,
}


def main() -> int:
    """Import the architectures named and write each to a folder of its own; what fails is told beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("output", type=Path)
    parser.add_argument("names", nargs="+", choices=list(ARCHITECTURES))
    args = parser.parse_args()
    failed = 0
    for name in args.names:
        torch.manual_seed(SEED)
        try:
            write_model(args.output / name, ARCHITECTURES[name]())
        except Exception as error:
            failed += 1
            traceback.print_exc()
            (args.output / name).mkdir(parents=True, exist_ok=True)
            (args.output / name / "failed.json").write_text(json.dumps(f"{type(error).__name__}: {error}"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
