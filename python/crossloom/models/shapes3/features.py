"""Log-mel spectrogram as Whisper computes it, in numpy.

Slaney mel scale and area normalisation (M. Slaney, Auditory Toolbox, 1998;
the defaults of librosa), a periodic Hann window, reflect padding, the last
frame dropped; then ``log10``, clamped to 8 decades below the clip's maximum,
``(x + 4) / 4``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .config import CONFIG, Config

_HZ_PER_MEL = 200.0 / 3.0  # linear part, up to 1 kHz
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _HZ_PER_MEL
_LOG_STEP = np.log(6.4) / 27.0  # 27 mels from 1 kHz to 6.4 kHz


def hz_to_mel(hz: np.ndarray) -> np.ndarray:
    """Slaney's mel scale: linear below 1 kHz, logarithmic above."""
    hz = np.asarray(hz, dtype=np.float64)
    log_part = _BREAK_MEL + np.log(np.maximum(hz, _BREAK_HZ) / _BREAK_HZ) / _LOG_STEP
    return np.where(hz < _BREAK_HZ, hz / _HZ_PER_MEL, log_part)


def mel_to_hz(mel: np.ndarray) -> np.ndarray:
    """Inverse of `hz_to_mel`."""
    mel = np.asarray(mel, dtype=np.float64)
    log_part = _BREAK_HZ * np.exp((np.maximum(mel, _BREAK_MEL) - _BREAK_MEL) * _LOG_STEP)
    return np.where(mel < _BREAK_MEL, mel * _HZ_PER_MEL, log_part)


@lru_cache(maxsize=4)
def mel_filterbank(
    n_mels: int = CONFIG.n_mels,
    n_fft: int = CONFIG.n_fft,
    sample_rate: int = CONFIG.sample_rate,
) -> np.ndarray:
    """Triangular filters from 0 Hz to Nyquist, each of area 1 (in Hz).

    Returns
    -------
    np.ndarray
        ``(n_mels, n_fft // 2 + 1)`` float32, read-only.
    """
    bins = np.arange(n_fft // 2 + 1) * (sample_rate / n_fft)
    top = hz_to_mel(np.array(sample_rate / 2.0))
    edges = mel_to_hz(np.linspace(0.0, float(top), n_mels + 2))
    low, mid, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rise = (bins - low) / (mid - low)
    fall = (high - bins) / (high - mid)
    bank = np.maximum(0.0, np.minimum(rise, fall)) * (2.0 / (high - low))
    bank = bank.astype(np.float32)
    bank.setflags(write=False)
    return bank


def log_mel(audio: np.ndarray, config: Config = CONFIG) -> np.ndarray:
    """Log-mel features of clips of exactly ``config.audio_samples`` samples.

    Parameters
    ----------
    audio : np.ndarray
        ``(batch, samples)`` float32, roughly in [-1, 1].

    Returns
    -------
    np.ndarray
        ``(batch, n_mels, frames)`` float32.
    """
    half = config.n_fft // 2
    padded = np.pad(audio, ((0, 0), (half, half)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, config.n_fft, axis=1)
    windows = windows[:, :: config.hop][:, : config.frames]  # (batch, frames, n_fft)
    hann = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(config.n_fft) / config.n_fft)
    spectrum = np.fft.rfft(windows * hann.astype(np.float32), axis=-1)
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
    bank = mel_filterbank(config.n_mels, config.n_fft, config.sample_rate)
    mel = power @ bank.T  # (batch, frames, n_mels)
    log = np.log10(np.maximum(mel, 1e-10)).transpose(0, 2, 1)
    log = np.maximum(log, log.max(axis=(1, 2), keepdims=True) - 8.0)
    return np.ascontiguousarray((log + 4.0) / 4.0, dtype=np.float32)
