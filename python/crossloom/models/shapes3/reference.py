"""Every part of shapes3 in plain numpy, written independently of the network.

This is the reference the imported, compiled and accelerated versions are
compared with. All arithmetic is float32 unless a line says otherwise.
"""

from __future__ import annotations

from functools import lru_cache
from math import erf, sqrt

import numpy as np

from .config import CONFIG, Config
from .weights import weights

_erf = np.vectorize(erf, otypes=[np.float64])


def gelu(x: np.ndarray) -> np.ndarray:
    """Exact GELU, ``x * Phi(x)``; Phi tabulated once, error below 2e-8.

    numpy has no vector erf. Phi is read from a table of step 1/512 over
    [-8, 8] with a second-order Taylor step, whose derivatives are known in
    closed form; beyond 8 it is 0 or 1 within float32.
    """
    nodes, table = _phi_table()
    clipped = np.clip(x.astype(np.float64), -8.0, 8.0)
    index = np.rint((clipped + 8.0) * 512.0).astype(np.int64)
    at = nodes[index]
    step = clipped - at
    density = np.exp(-0.5 * at * at) / sqrt(2.0 * np.pi)
    phi = table[index] + step * density * (1.0 - 0.5 * at * step)
    return (x * phi).astype(np.float32)


@lru_cache(maxsize=1)
def _phi_table() -> tuple[np.ndarray, np.ndarray]:
    nodes = np.linspace(-8.0, 8.0, 16 * 512 + 1)
    return nodes, 0.5 * (1.0 + _erf(nodes / sqrt(2.0)))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """LayerNorm over the last axis, biased variance."""
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = (centered * centered).mean(axis=-1, keepdims=True)
    return centered / np.sqrt(variance + np.float32(eps)) * weight + bias


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm over the last axis."""
    mean_square = (x * x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def rotate(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Rotate the pairs (i, i + dim/2) of the last axis by `angle`.

    Parameters
    ----------
    x : np.ndarray
        ``(heads, seq, dim)``.
    angle : np.ndarray
        ``(seq, dim / 2)`` radians.
    """
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _frequencies(number: int, theta: float) -> np.ndarray:
    """``theta ** (-i / number)`` for i = 0 .. number-1, float32."""
    return (theta ** (-np.arange(number) / number)).astype(np.float32)


def _heads(x: np.ndarray, number: int) -> np.ndarray:
    """``(seq, number * dim) -> (number, seq, dim)``."""
    return x.reshape(len(x), number, -1).transpose(1, 0, 2)


def _merge(x: np.ndarray) -> np.ndarray:
    """``(heads, seq, dim) -> (seq, heads * dim)``."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


class Reference:
    """The five entries over one set of weights.

    Parameters
    ----------
    params : dict of str to np.ndarray, optional
        float32 arrays by name; the shipped weights by default.
    config : Config, optional
        Dimensions.
    """

    def __init__(self, params: dict[str, np.ndarray] | None = None, config: Config = CONFIG) -> None:
        self.params = weights() if params is None else params
        self.config = config

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        out = x @ self.params[f"{name}.weight"].T
        bias = self.params.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        bias = self.params.get(f"{name}.bias")
        weight = self.params[f"{name}.weight"]
        if bias is None:
            return rms_norm(x, weight, self.config.rms_norm_eps)
        return layer_norm(x, weight, bias, self.config.layer_norm_eps)

    def vision(self, image: np.ndarray) -> np.ndarray:
        """``(1, 3, 48, 48) -> vision_hidden (1, 36, vision_dim)``."""
        c = self.config
        # A convolution whose stride is its size is a matrix product on patches.
        patches = image[0].reshape(c.channels, c.grid, c.patch_size, c.grid, c.patch_size)
        patches = patches.transpose(1, 3, 0, 2, 4).reshape(c.vision_tokens, -1)
        kernel = self.params["vision.patch_embed.proj.weight"].reshape(c.vision_dim, -1)
        x = patches @ kernel.T + self.params["vision.patch_embed.proj.bias"]

        frequency = _frequencies(c.vision_head_dim // 4, c.vision_rope_theta)
        row, col = np.divmod(np.arange(c.vision_tokens), c.grid)
        angle = np.concatenate([np.outer(row, frequency), np.outer(col, frequency)], axis=1)
        scale = np.float32(1.0 / sqrt(c.vision_head_dim))
        for layer in range(c.vision_layers):
            name = f"vision.blocks.{layer}"
            qkv = self._linear(f"{name}.attn.qkv", self._norm(f"{name}.norm1", x))
            q, k, v = (_heads(part, c.vision_heads) for part in np.split(qkv, 3, axis=1))
            scores = rotate(q, angle) @ rotate(k, angle).transpose(0, 2, 1) * scale
            x = x + self._linear(f"{name}.attn.proj", _merge(softmax(scores) @ v))
            inner = gelu(self._linear(f"{name}.mlp.fc1", self._norm(f"{name}.norm2", x)))
            x = x + self._linear(f"{name}.mlp.fc2", inner)
        return self._norm("vision.norm", x)[None]

    def projector(self, hidden: np.ndarray) -> np.ndarray:
        """``vision_hidden (1, 36, vision_dim) -> vision_features (1, 36, dim)``."""
        return self._linear("projector.linear_2", gelu(self._linear("projector.linear_1", hidden)))

    def _conv3(self, name: str, x: np.ndarray, stride: int) -> np.ndarray:
        """Convolution of width 3, padding 1, over ``(time, channels)``."""
        kernel = self.params[f"{name}.weight"]  # (out, in, 3)
        padded = np.pad(x, ((1, 1), (0, 0)))
        taps = [padded[tap : tap + len(x)][::stride] @ kernel[:, :, tap].T for tap in range(3)]
        return taps[0] + taps[1] + taps[2] + self.params[f"{name}.bias"]

    def audio(self, log_mel: np.ndarray) -> np.ndarray:
        """``log_mel (1, 40, 128) -> audio_features (1, 64, dim)``."""
        c = self.config
        x = gelu(self._conv3("audio.conv1", log_mel[0].T, 1))
        x = gelu(self._conv3("audio.conv2", x, 2))
        half = c.audio_dim // 2
        timescale = 10000.0 ** (np.arange(half) / (half - 1))
        angle = np.arange(c.audio_tokens)[:, None] / timescale
        x = x + np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)
        scale = np.float32(1.0 / sqrt(c.audio_head_dim))
        for layer in range(c.audio_layers):
            name = f"audio.layers.{layer}"
            normed = self._norm(f"{name}.self_attn_layer_norm", x)
            q, k, v = (_heads(self._linear(f"{name}.self_attn.{part}_proj", normed), c.audio_heads) for part in "qkv")
            mixed = softmax(q @ k.transpose(0, 2, 1) * scale) @ v
            x = x + self._linear(f"{name}.self_attn.out_proj", _merge(mixed))
            normed = self._norm(f"{name}.final_layer_norm", x)
            x = x + self._linear(f"{name}.fc2", gelu(self._linear(f"{name}.fc1", normed)))
        return self._linear("audio.proj", self._norm("audio.layer_norm", x))[None]

    def embed(self, vision_features: np.ndarray, audio_features: np.ndarray, input_ids: np.ndarray) -> np.ndarray:
        """The three inputs in one sequence, ``(1, nv + na + n, dim)``."""
        text = self.params["model.embed_tokens.weight"][input_ids]
        return np.concatenate([vision_features, audio_features, text], axis=1)

    def _decoder(
        self,
        x: np.ndarray,
        mask: np.ndarray,
        positions: np.ndarray,
        past: tuple[np.ndarray, np.ndarray] | None,
    ) -> list[np.ndarray]:
        c = self.config
        angle = positions[:, None].astype(np.float32) * _frequencies(c.head_dim // 2, c.rope_theta)
        scale = np.float32(1.0 / sqrt(c.head_dim))
        keys, values = [], []
        for layer in range(c.layers):
            name = f"model.layers.{layer}"
            normed = self._norm(f"{name}.input_layernorm", x)
            q = rotate(_heads(self._linear(f"{name}.self_attn.q_proj", normed), c.heads), angle)
            k = rotate(_heads(self._linear(f"{name}.self_attn.k_proj", normed), c.kv_heads), angle)
            v = _heads(self._linear(f"{name}.self_attn.v_proj", normed), c.kv_heads)
            if past is not None:
                k = np.concatenate([past[0][layer, 0], k], axis=1)
                v = np.concatenate([past[1][layer, 0], v], axis=1)
            keys.append(k)
            values.append(v)
            # Query heads 2g and 2g+1 read key/value head g.
            grouped = q.reshape(c.kv_heads, -1, *q.shape[1:])
            scores = grouped @ k[:, None].transpose(0, 1, 3, 2) * scale + mask[0, 0]
            mixed = (softmax(scores) @ v[:, None]).reshape(q.shape)
            x = x + self._linear(f"{name}.self_attn.o_proj", _merge(mixed))
            normed = self._norm(f"{name}.post_attention_layernorm", x)
            gate = self._linear(f"{name}.mlp.gate_proj", normed)
            gate = gate / (1.0 + np.exp(-gate))
            gated = gate * self._linear(f"{name}.mlp.up_proj", normed)
            x = x + self._linear(f"{name}.mlp.down_proj", gated)
        last = self._norm("model.norm", x[-1:])
        logits = last @ self.params["model.embed_tokens.weight"].T
        return [logits[None], np.stack(keys)[:, None], np.stack(values)[:, None]]

    def prefill(
        self, inputs_embeds: np.ndarray, attention_mask: np.ndarray, position_ids: np.ndarray
    ) -> list[np.ndarray]:
        """Logits ``(1, 1, V)`` of the last position and the caches."""
        return self._decoder(inputs_embeds[0], attention_mask, position_ids[0], None)

    def decode(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray,
        position_ids: np.ndarray,
        past_key: np.ndarray,
        past_value: np.ndarray,
    ) -> list[np.ndarray]:
        """One token: logits ``(1, 1, V)`` and the caches, one longer."""
        x = self.params["model.embed_tokens.weight"][input_ids[0]]
        return self._decoder(x, attention_mask, position_ids[0], (past_key, past_value))

    def run(self, entry: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Run entry ``vision``, ``audio``, ``embed``, ``prefill`` or ``decode``."""
        if entry == "vision":
            return [self.projector(self.vision(**inputs))]
        if entry == "audio":
            return [self.audio(**inputs)]
        if entry == "embed":
            return [self.embed(**inputs)]
        if entry == "prefill":
            return self.prefill(**inputs)
        if entry == "decode":
            return self.decode(**inputs)
        raise KeyError(f"shapes3 has no entry {entry!r}")


@lru_cache(maxsize=1)
def _shipped() -> Reference:
    return Reference()


def run(entry: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Executor over the shipped weights; see `Reference.run`."""
    return _shipped().run(entry, inputs)
