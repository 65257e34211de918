"""The trainable model in PyTorch, spelled as Hugging Face models spell it.

Parameter names here are the names in ``shapes3.safetensors`` and in the ONNX
files.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention over ``(batch, heads, seq, dim)``.

    Training takes the fused kernel; evaluation, and so the export, takes the
    eager spelling with one MatMul, Add, Softmax, MatMul.
    """
    scale = q.shape[-1] ** -0.5
    if module.training:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1), v)


class PatchEmbed(nn.Module):
    """Non-overlapping convolution, ``(b, 3, 48, 48) -> (b, 36, dim)``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.channels, config.vision_dim, config.patch_size, config.patch_size)

    def forward(self, image: Tensor) -> Tensor:
        return self.proj(image).flatten(2).transpose(1, 2)


class VisionAttention(nn.Module):
    """Fused, biased QKV with 2-D rotary (Qwen2-VL's vision tower)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.vision_heads
        self.qkv = nn.Linear(config.vision_dim, 3 * config.vision_dim)
        self.proj = nn.Linear(config.vision_dim, config.vision_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        qkv = self.qkv(x).reshape(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q = q * cos + _rotate_half(q) * sin
        k = k * cos + _rotate_half(k) * sin
        out = _attend(self, q, k, v, None)
        return self.proj(out.transpose(1, 2).reshape(batch, seq, dim))


class VisionMLP(nn.Module):
    """Linear, exact GELU, Linear."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.vision_dim, config.vision_mlp_dim)
        self.fc2 = nn.Linear(config.vision_mlp_dim, config.vision_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class VisionBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.vision_dim, config.layer_norm_eps)
        self.attn = VisionAttention(config)
        self.norm2 = nn.LayerNorm(config.vision_dim, config.layer_norm_eps)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    """Vision tower, ``(b, 3, 48, 48) -> (b, 36, vision_dim)``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.vision_layers))
        self.norm = nn.LayerNorm(config.vision_dim, config.layer_norm_eps)
        # Qwen2-VL: half of the angles by row, half by column, then repeated
        # so that rotate_half pairs element i with element i + head_dim / 2.
        half = config.vision_head_dim // 2
        inv_freq = config.vision_rope_theta ** -(torch.arange(0, half, 2).float() / half)
        angles = torch.outer(torch.arange(config.grid).float(), inv_freq)
        row = angles[:, None, :].expand(config.grid, config.grid, -1)
        col = angles[None, :, :].expand(config.grid, config.grid, -1)
        angle = torch.cat((row, col), dim=-1).reshape(config.vision_tokens, half)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.norm(x)


class Projector(nn.Module):
    """Vision width to decoder width (LLaVA's two-layer projector)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(config.vision_dim, config.dim)
        self.linear_2 = nn.Linear(config.dim, config.dim)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(hidden)))


class AudioAttention(nn.Module):
    """Whisper's attention: q, v and out have a bias, k has none."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.audio_dim
        self.heads = config.audio_heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        split = (batch, seq, self.heads, dim // self.heads)
        q = self.q_proj(x).view(split).transpose(1, 2)
        k = self.k_proj(x).view(split).transpose(1, 2)
        v = self.v_proj(x).view(split).transpose(1, 2)
        out = _attend(self, q, k, v, None)
        return self.out_proj(out.transpose(1, 2).reshape(batch, seq, dim))


class AudioLayer(nn.Module):
    """Whisper's encoder layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.audio_dim, config.layer_norm_eps)
        self.self_attn = AudioAttention(config)
        self.final_layer_norm = nn.LayerNorm(config.audio_dim, config.layer_norm_eps)
        self.fc1 = nn.Linear(config.audio_dim, config.audio_mlp_dim)
        self.fc2 = nn.Linear(config.audio_mlp_dim, config.audio_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class Audio(nn.Module):
    """Audio tower, ``(b, 40, 128) -> (b, 64, dim)``."""

    positions: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.audio_dim
        self.conv1 = nn.Conv1d(config.n_mels, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.audio_layers))
        self.layer_norm = nn.LayerNorm(dim, config.layer_norm_eps)
        self.proj = nn.Linear(dim, config.dim)
        # Whisper's sinusoids: all sines, then all cosines.
        step = math.log(10000.0) / (dim // 2 - 1)
        inv_timescale = torch.exp(-step * torch.arange(dim // 2).float())
        angle = torch.outer(torch.arange(config.audio_tokens).float(), inv_timescale)
        table = torch.cat((angle.sin(), angle.cos()), dim=-1)
        self.register_buffer("positions", table, persistent=False)

    def forward(self, log_mel: Tensor) -> Tensor:
        x = F.gelu(self.conv1(log_mel))
        x = F.gelu(self.conv2(x))
        x = x.permute(0, 2, 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.proj(self.layer_norm(x))


class RMSNorm(nn.Module):
    """Root-mean-square norm in Hugging Face's spelling."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class DecoderAttention(nn.Module):
    """Grouped-query attention with 1-D rotary and a cache."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def _repeat(self, x: Tensor) -> Tensor:
        batch, heads, seq, dim = x.shape
        groups = self.heads // self.kv_heads
        x = x[:, :, None, :, :].expand(batch, heads, groups, seq, dim)
        return x.reshape(batch, heads * groups, seq, dim)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        q = q * cos + _rotate_half(q) * sin
        k = k * cos + _rotate_half(k) * sin
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        out = _attend(self, q, self._repeat(k), self._repeat(v), mask)
        out = out.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim)
        return self.o_proj(out), k, v


class DecoderMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.down_proj = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Llama's decoder layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.rms_norm_eps)
        self.self_attn = DecoderAttention(config)
        self.post_attention_layernorm = RMSNorm(config.dim, config.rms_norm_eps)
        self.mlp = DecoderMLP(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, key, value = self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), key, value


class Decoder(nn.Module):
    """Llama-like decoder; the embedding is also the output matrix."""

    inv_freq: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.rms_norm_eps)
        dim = config.head_dim
        inv_freq = config.rope_theta ** -(torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states and the caches, stacked over layers."""
        angle = position_ids[:, :, None].float() * self.inv_freq[None, None, :]
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        x = inputs_embeds
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            past = None
            if past_key is not None and past_value is not None:
                past = (past_key[index], past_value[index])
            x, key, value = layer(x, cos, sin, attention_mask, past)
            keys.append(key)
            values.append(value)
        return self.norm(x), torch.stack(keys), torch.stack(values)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary."""
        return F.linear(hidden, self.embed_tokens.weight)


class Shapes3(nn.Module):
    """All parts, under the names of the weight file."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.vision = Vision(config)
        self.projector = Projector(config)
        self.audio = Audio(config)
        self.model = Decoder(config)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                fan_in = parameter[0].numel()
                nn.init.normal_(parameter, std=min(0.08, fan_in**-0.5 * 0.7))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
