"""Greedy answers and accuracy over any executor of the five entries.

The same functions drive the numpy reference, ONNX Runtime, a compiled host
build and a run under QEMU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from . import vocab
from .config import CONFIG
from .data import Sample

Run = Callable[[str, dict[str, np.ndarray]], list[np.ndarray]]

# Added to the scores a query must not see; finite, so that no row is all -inf.
MASKED = np.float32(-1e9)


def encode_prompt(sample: Sample) -> np.ndarray:
    """Text ids of the prompt: the question where it is written, then ``<sep>``.

    Returns
    -------
    np.ndarray
        ``(1, n)`` int64; n is 1 for a spoken question.
    """
    text = vocab.encode(sample.question if sample.log_mel is None else "")
    return np.append(text, vocab.SEP)[None]


def causal_mask(length: int) -> np.ndarray:
    """Additive causal mask ``(1, 1, length, length)`` float32."""
    return np.triu(np.full((length, length), MASKED, dtype=np.float32), k=1)[None, None]


def generate(run: Run, sample: Sample, max_tokens: int = 16) -> str:
    """Answer `sample` greedily, character by character, until ``<eos>``.

    Parameters
    ----------
    run : callable
        ``run(entry, inputs) -> outputs`` in the order of the ONNX files.
    sample : Sample
        Drawing and question; a spoken one where ``log_mel`` is set.
    max_tokens : int
        Most tokens to generate, ``<eos>`` included.
    """
    vision = run("vision", {"image": sample.image})[0]
    if sample.log_mel is None:
        audio = np.zeros((1, 0, CONFIG.dim), dtype=np.float32)
    else:
        audio = run("audio", {"log_mel": sample.log_mel})[0]
    prompt = {"vision_features": vision, "audio_features": audio}
    embeds = run("embed", {**prompt, "input_ids": encode_prompt(sample)})[0]
    length = embeds.shape[1]
    logits, key, value = run(
        "prefill",
        {
            "inputs_embeds": embeds,
            "attention_mask": causal_mask(length),
            "position_ids": np.arange(length, dtype=np.int64)[None],
        },
    )
    tokens: list[int] = []
    while True:
        tokens.append(int(np.argmax(logits[0, -1])))
        if tokens[-1] == vocab.EOS or len(tokens) == max_tokens:
            return vocab.decode(tokens)
        length += 1
        logits, key, value = run(
            "decode",
            {
                "input_ids": np.array([[tokens[-1]]], dtype=np.int64),
                "attention_mask": np.zeros((1, 1, 1, length), dtype=np.float32),
                "position_ids": np.array([[length - 1]], dtype=np.int64),
                "past_key": key,
                "past_value": value,
            },
        )


def accuracy(run: Run, samples: Sequence[Sample]) -> float:
    """Share of `samples` whose greedy answer is exactly right."""
    right = sum(generate(run, sample) == sample.answer for sample in samples)
    return right / len(samples)
