"""Dimensions of the shapes3 model, in one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Every size and constant that the forward passes share.

    The three towers keep the same width so that one group size (32, 64 or
    128) divides every matrix of the model.
    """

    # Image: (1, channels, image_size, image_size), values in [0, 1].
    channels: int = 3
    image_size: int = 48
    patch_size: int = 8

    # Vision tower (Qwen2-VL spelling: fused biased QKV, 2-D rotary).
    vision_dim: int = 128
    vision_layers: int = 3
    vision_heads: int = 4
    vision_mlp_dim: int = 384
    vision_rope_theta: float = 10000.0

    # Log-mel front end (Whisper's, at 40 bands and 1.28 s).
    sample_rate: int = 16000
    n_fft: int = 400
    hop: int = 160
    n_mels: int = 40
    frames: int = 128

    # Audio tower (Whisper spelling: biased q and v, unbiased k).
    audio_dim: int = 128
    audio_layers: int = 2
    audio_heads: int = 4
    audio_mlp_dim: int = 384
    layer_norm_eps: float = 1e-5

    # Decoder (Llama/Qwen spelling).
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp_dim: int = 384
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    vocab_size: int = 32

    @property
    def grid(self) -> int:
        """Patches along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def vision_tokens(self) -> int:
        """Tokens one image occupies in the decoder."""
        return self.grid * self.grid

    @property
    def audio_tokens(self) -> int:
        """Tokens one clip occupies in the decoder (the second conv halves)."""
        return self.frames // 2

    @property
    def audio_samples(self) -> int:
        """Samples of one clip."""
        return self.frames * self.hop

    @property
    def vision_head_dim(self) -> int:
        """Width of one vision attention head."""
        return self.vision_dim // self.vision_heads

    @property
    def audio_head_dim(self) -> int:
        """Width of one audio attention head."""
        return self.audio_dim // self.audio_heads

    @property
    def head_dim(self) -> int:
        """Width of one decoder attention head."""
        return self.dim // self.heads


CONFIG = Config()
