"""Character-level tokenizer: four specials, space, ``?`` and a-z."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

SPECIALS = ("<pad>", "<sep>", "<eos>", "<unk>")
PAD, SEP, EOS, UNK = range(len(SPECIALS))
CHARS = " ?abcdefghijklmnopqrstuvwxyz"
TOKENS = SPECIALS + tuple(CHARS)
_ID = {token: index for index, token in enumerate(TOKENS)}


def encode(text: str) -> np.ndarray:
    """Token ids of `text`, without specials.

    Parameters
    ----------
    text : str
        Lower-case text; a character outside the vocabulary becomes ``<unk>``.

    Returns
    -------
    np.ndarray
        ``(len(text),)`` int64.
    """
    return np.array([_ID.get(char, UNK) for char in text], dtype=np.int64)


def decode(ids: Iterable[int]) -> str:
    """Text of `ids` up to the first ``<eos>``; specials read as ``<name>``."""
    out = []
    for index in ids:
        if index == EOS:
            break
        out.append(TOKENS[index])
    return "".join(out)
