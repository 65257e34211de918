"""Targets by name: ours, those of installed plugins, and any TVM target."""

from __future__ import annotations

import difflib
import platform
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tvm.target import codegen

from ..entry_points import broken_plugins, load_entry_points
from ..errors import UnsupportedTarget, UsageError
from .host import with_host_cpu
from .load import DATA, load_target_file
from .model import Cpu, Target
from .processor import checked
from .spec import override, raw_cpu, split_composite, split_options

#: Entry points of third parties' targets.
GROUP = "crossloom.targets"
#: First word of a composite target -> its option that chooses the chip, and that option's default.
_NPUS = {"ane": ("chip", "m4"), "rknn": ("platform", "rk3588")}


@lru_cache(maxsize=64)
def _load(path: Path) -> Target:
    return load_target_file(path)


def list_targets() -> dict[str, Target]:
    """Return all known targets by name, sorted: ours and those of entry points ``crossloom.targets``.

    An entry point resolves to the path of a target file, or to a callable that returns one path or several.

    A plugin that does not load, or defines a name that is taken, is left out with a ``CrossloomWarning``.
    """
    found: dict[str, Target] = {}
    for path in sorted(DATA.glob("*.toml")):
        if not path.name.startswith("table_"):
            target = _load(path)
            found[target.name] = with_host_cpu(target) if target.name == "host" else target

    def add(plugin: str, given: Any) -> None:
        given = given() if callable(given) else given
        for path in [given] if isinstance(given, (str, Path)) else list(given):
            target = load_target_file(Path(path))
            if target.name in found:
                raise UsageError(f"it defines target {target.name!r}, which exists already", "rename it")
            found[target.name] = target

    load_entry_points(GROUP, add)
    return dict(sorted(found.items()))


def _raw(text: str) -> Target:
    cpu = raw_cpu(text)
    if cpu.kind == "llvm" and not cpu.triple:
        cpu = replace(cpu, triple=codegen.llvm_get_system_triple())
    base = list_targets()["host"]
    target = Target("custom", f"TVM target {text}", _family(cpu), cpu, spec=text, capabilities=base.capabilities)
    checked(target)
    tvm_target = target.tvm_target()
    if cpu.kind == "llvm":
        target = replace(target, cpu=replace(cpu, vector_bytes=codegen.llvm_get_vector_width(tvm_target) // 8))
    return target


def _family(cpu: Cpu) -> str:
    if cpu.kind == "c" or "-none-" in cpu.triple:
        return "micro"
    darwin = "apple" in cpu.triple or (not cpu.triple and platform.system() == "Darwin")
    return "macos" if darwin else "linux"


def _known(name: str) -> Target:
    targets = list_targets()
    if name not in targets:
        close = difflib.get_close_matches(name, [*targets, *_NPUS, "llvm"], n=3, cutoff=0.4)
        remedy = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(targets)}"
        raise UnsupportedTarget(f"unknown target {name!r}", "; ".join(filter(None, (remedy, broken_plugins(GROUP)))))
    return targets[name]


def _npu_target(spec: str, text: str) -> Target:
    """Read the NPU's part of a composite: ``ane -chip=m4``, ``rknn -platform=rk3588`` or a known name."""
    name, options = split_options(text)
    if name not in _NPUS:
        return checked(override(_known(name), options, spec))
    key, default = _NPUS[name]
    chip = options.pop(key, default)
    served = {t.npu.platform: t for t in list_targets().values() if t.npu is not None and t.npu.codegen == name}
    if chip not in served:
        raise UnsupportedTarget(f"target {spec!r}: {name} has no {key} {chip!r}", f"known: {', '.join(served)}")
    target = checked(override(served[chip], options, spec))
    npu = target.npu
    return target if npu is None else replace(target, npu=replace(npu, options={**npu.options, key: chip}))


def get_target(spec: str | Target) -> Target:
    """Return the target that a text describes.

    Parameters
    ----------
    spec : str
        - a known name, with overrides or without: ``"rk3588"``, ``"rk3588 -cores=2 -bandwidth=17e9"``,
          ``"apple-m4 -bank.B0=65536"``;
        - a TVM target: ``"llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a76"`` or ``'{"kind": "llvm", ...}'``;
        - an NPU with a CPU: ``"ane -chip=m4 -os=18, llvm -mtriple=arm64-apple-macos"``.

    Raises
    ------
    UnsupportedTarget
        For an unknown name (with the closest ones), an attribute TVM refuses, or a processor LLVM does not know.
    UsageError
        For text that cannot be read, or an unknown override.
    """
    if isinstance(spec, Target):
        return spec
    text = spec.strip()
    if not text:
        raise UsageError("the target is empty", "`tvmc targets` lists the names")
    first, second = split_composite(text)
    if second is not None:
        npu = _npu_target(text, first)
        if npu.npu is None:
            raise UsageError(f"target {text!r}: {first!r} has no NPU", "write one CPU target, or an NPU before it")
        cpu = get_target(second).cpu
        # The clusters and caches are the chip's; the code generation is as the user wrote it.
        return replace(npu, cpu=replace(cpu, clusters=npu.cpu.clusters, l3_bytes=npu.cpu.l3_bytes))
    if text.startswith("{"):
        return _raw(text)
    name, options = split_options(text)
    if name in ("llvm", "c"):
        return _raw(text)
    if name in _NPUS:
        return _npu_target(text, first)
    target = _known(name)
    return checked(override(target, options, text)) if options else target
