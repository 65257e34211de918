"""Options of passes: frozen dataclasses whose fields are also the text form and the command-line options.

``fuse-rotary-mlp{max-bytes=65536,keep=true},plan-memory-banks`` is a pipeline of two passes.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from .errors import UsageError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")


@dataclasses.dataclass(frozen=True)
class PassText:
    """One pass of a textual pipeline: its name and its options as text."""

    name: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}{{{','.join(f'{k}={v}' for k, v in self.options)}}}"


def parse_pipeline(text: str) -> list[PassText]:
    """Parse ``name{key=value,...},name,...``; the inverse of :func:`format_pipeline`.

    Raises
    ------
    UsageError
        Naming the character at which the text stops making sense.

    Examples
    --------
    >>> parse_pipeline("fuse{max-bytes=65536,keep=true}, relax.FuseOps")[0].options
    (('max-bytes', '65536'), ('keep', 'true'))
    """
    passes: list[PassText] = []
    at, text = 0, text.strip()
    while at < len(text):
        match = _NAME.match(text, at)
        if match is None:
            raise UsageError(f"pipeline text {text!r}: expected a pass name at character {at}")
        name, at = match.group(), match.end()
        options: list[tuple[str, str]] = []
        if at < len(text) and text[at] == "{":
            end = text.find("}", at)
            if end < 0:
                raise UsageError(f"pipeline text {text!r}: the '{{' at character {at} is never closed")
            for item in filter(None, (part.strip() for part in text[at + 1 : end].split(","))):
                key, sign, value = item.partition("=")
                if not sign:
                    raise UsageError(f"pipeline text: option {item!r} of {name} has no value", "write key=value")
                options.append((key.strip(), value.strip()))
            at = end + 1
        passes.append(PassText(name, tuple(options)))
        while at < len(text) and text[at].isspace():
            at += 1
        if at < len(text):
            if text[at] != ",":
                raise UsageError(f"pipeline text {text!r}: expected ',' at character {at}")
            at += 1
            while at < len(text) and text[at].isspace():
                at += 1
            if at == len(text):
                raise UsageError(f"pipeline text {text!r}: ends with ','")
    return passes


def format_pipeline(passes: list[PassText]) -> str:
    """Return the text of a pipeline.

    Examples
    --------
    >>> format_pipeline(parse_pipeline("fuse{max-bytes=65536},  plan"))
    'fuse{max-bytes=65536},plan'
    """
    return ",".join(map(str, passes))


def _convert(owner: str, key: str, hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [h for h in typing.get_args(hint) if h is not type(None)]
        if value is None or value == "none":
            return None
        hint = inner[0]
    if isinstance(value, str):
        try:
            if hint is bool:
                return {"true": True, "false": False}[value.lower()]
            if hint in (int, float):
                return hint(value)
        except (KeyError, ValueError):
            raise UsageError(f"{owner}: {key}={value!r} is not a {hint.__name__}") from None
        if typing.get_origin(hint) is tuple:
            return tuple(part for part in value.split("+") if part)
    if typing.get_origin(hint) is typing.Literal and value not in typing.get_args(hint):
        raise UsageError(f"{owner}: {key}={value!r} is not one of {', '.join(map(str, typing.get_args(hint)))}")
    return value


def build_options(owner: str, kind: type | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check and convert options (text or values) against a dataclass; keys may use ``-`` for ``_``.

    Returns
    -------
    dict
        Only the keys that were given, by field name, for ``factory(**options)``.

    Raises
    ------
    UsageError
        For an unknown key (listing those known) or a value of the wrong type.

    Examples
    --------
    >>> @dataclasses.dataclass(frozen=True)
    ... class Options:
    ...     max_bytes: int = 4096
    >>> build_options("fuse", Options, {"max-bytes": "65536"})
    {'max_bytes': 65536}
    >>> build_options("fuse", Options, {"max-bytes": "many"})
    Traceback (most recent call last):
    ...
    crossloom.errors.UsageError: fuse: max-bytes='many' is not a int
    """
    hints = typing.get_type_hints(kind) if kind is not None else {}
    out: dict[str, Any] = {}
    for key, value in given.items():
        field = key.replace("-", "_")
        if field not in hints:
            known = ", ".join(name.replace("_", "-") for name in hints) or "none"
            raise UsageError(f"pass {owner} has no option {key!r}", f"its options: {known}")
        out[field] = _convert(owner, key, hints[field], value)
    return out
