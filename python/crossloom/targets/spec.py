"""Read target text: known names with overrides, raw TVM targets, and ``npu, cpu`` pairs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from typing import Any

from ..errors import UnsupportedTarget, UsageError
from .model import Cpu, Target

_INTS = {"num-cores", "opt-level", "vector-width", "workspace-byte-alignment", "constants-byte-alignment"}
_LISTS = {"mattr", "keys", "libs"}
_CPU_START = re.compile(r",\s*(?=(?:llvm|c|host)\b(?!-)|\{)")


def split_composite(text: str) -> tuple[str, str | None]:
    """Split ``"ane -chip=m4, llvm -mcpu=..."`` at the comma before the CPU's target; lists stay whole."""
    if text.lstrip().startswith("{"):
        return text.strip(), None
    parts = _CPU_START.split(text, maxsplit=1)
    return parts[0].strip(), parts[1].strip() if len(parts) == 2 else None


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """Split ``"name -key=value -flag"`` into the name and its options.

    Raises
    ------
    UsageError
        When a word is not an option, an option is given twice, or there is no name.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"target {text!r}: {error}") from None
    if not words or words[0].startswith("-"):
        raise UsageError(f"target {text!r} does not start with a name", "e.g. `rk3588` or `llvm -mcpu=cortex-a76`")
    options: dict[str, str] = {}
    for word in words[1:]:
        key, sign, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not key:
            raise UsageError(f"target {text!r}: {word!r} is not an option", "write -key=value")
        if key in options:
            raise UsageError(f"target {text!r}: -{key} is given twice")
        options[key] = value if sign else "true"
    return words[0], options


def _value(text: str, key: str, value: str) -> Any:
    if key in _LISTS:
        return tuple(part for part in value.split(",") if part)
    if key in _INTS:
        if not value.isdigit():
            raise UsageError(f"target {text!r}: -{key}={value} is not a whole number")
        return int(value)
    return {"true": True, "false": False}.get(value, value)


def raw_cpu(text: str) -> Cpu:
    """Read a TVM target written as JSON or in the old command-line form, which TVM itself no longer reads.

    Raises
    ------
    UsageError
        When the text is not an object, lacks ``kind``, or a value has the wrong type.
    """
    if text.startswith("{"):
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"target {text!r} is not JSON: {error}") from None
        if not isinstance(config.get("kind"), str):
            raise UsageError(f"target {text!r} has no kind", 'e.g. {"kind": "llvm", "mcpu": "cortex-a76"}')
        config = {key: tuple(v) if isinstance(v, list) else v for key, v in config.items()}
    else:
        kind, options = split_options(text)
        config = {key: _value(text, key, value) for key, value in options.items()}
        # `-target=` was the option's name before TVM 0.8.
        config = {"mtriple" if key == "target" else key: value for key, value in config.items()} | {"kind": kind}
    for key, kinds in (("mtriple", str), ("mcpu", str), ("mattr", tuple), ("num-cores", int)):
        if key in config and not isinstance(config[key], kinds):
            raise UsageError(f"target {text!r}: {key} has the wrong type: {config[key]!r}")
    named = {"kind", "mtriple", "mcpu", "mattr", "num-cores"}
    return Cpu(
        kind=config["kind"],
        source="given by the user",
        triple=config.get("mtriple", ""),
        mcpu=config.get("mcpu", ""),
        mattr=config.get("mattr", ()),
        num_cores=config.get("num-cores", 0),
        extra=tuple(sorted((k, v) for k, v in config.items() if k not in named)),
    )


def _number(spec: str, key: str, value: str, least: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not (least <= number < float("inf")):
        raise UsageError(f"target {spec!r}: -{key}={value} is not a number of at least {least:g}")
    return number


def override(target: Target, options: dict[str, str], spec: str) -> Target:
    """Apply ``-cores= -bandwidth= -mcpu= -mattr= -mtriple= -npu-cores= -bank.NAME=`` to a target.

    Raises
    ------
    UsageError
        For an unknown option or a value out of range.
    """
    cpu, npu, banks, changes = target.cpu, target.npu, list(target.banks), dict[str, Any]()
    for key, value in options.items():
        if key in ("cores", "num-cores"):
            cpu = replace(cpu, num_cores=int(_number(spec, key, value, 1)))
        elif key == "bandwidth":
            changes.update(bandwidth=_number(spec, key, value, 1), bandwidth_source="given by the user")
        elif key == "mcpu":
            cpu = replace(cpu, mcpu=value)
        elif key == "mtriple":
            cpu = replace(cpu, triple=value)
        elif key == "mattr":
            cpu = replace(cpu, mattr=tuple(part for part in value.split(",") if part))
        elif key == "npu-cores" and npu is not None:
            cores = int(_number(spec, key, value, 1))
            if cores > npu.cores:
                raise UnsupportedTarget(f"target {spec!r}: the NPU has {npu.cores} cores, not {cores}")
            npu = replace(npu, cores=cores)
        elif key == "os" and npu is not None and npu.codegen == "ane":
            _number(spec, key, value, 1)
            npu = replace(npu, options={**npu.options, "os": value})
        elif key.startswith("bank."):
            at = banks.index(target.bank(key.removeprefix("bank.")))
            size = int(_number(spec, key, value, 1))
            banks[at] = replace(banks[at], bytes=size, source="given by the user", verified=False)
        else:
            known = ["-cores", "-bandwidth", "-mcpu", "-mattr", "-mtriple"]
            known += ["-npu-cores"] if npu else []
            known += ["-os"] if npu and npu.codegen == "ane" else []
            known += [f"-bank.{b.name}" for b in banks]
            raise UsageError(f"target {target.name} has no option -{key}", f"its options: {', '.join(known)}")
    return replace(target, cpu=cpu, npu=npu, banks=tuple(banks), spec=spec, **changes)
