"""Ask LLVM whether it knows a processor, before it falls back to a generic one on its own."""

from __future__ import annotations

import difflib
import re

import tvm
from tvm.target import codegen

from ..errors import UnsupportedTarget
from .model import Cpu, Target

#: Spellings in triples -> LLVM's name of the architecture.
_ARCHITECTURES = (
    (re.compile(r"arm64.*"), "aarch64"),
    (re.compile(r"amd64"), "x86_64"),
    (re.compile(r"i[3-6]86"), "i386"),
    (re.compile(r"thumbv.*"), "thumb"),
    (re.compile(r"armv.*"), "arm"),
)


def checked(target: Target) -> Target:
    """Return `target` if LLVM knows its processor.

    Raises
    ------
    UnsupportedTarget
        LLVM does not: it would say so on standard error and make code for a generic one.
    """
    cpu = target.cpu
    if cpu.kind == "llvm" and cpu.mcpu and _can_ask(cpu) and not codegen.llvm_is_valid_cpu(cpu.mcpu, cpu.triple):
        known = sorted(str(name) for name in codegen.llvm_get_cpu_archlist(_plain(cpu)))
        close = difflib.get_close_matches(cpu.mcpu, known, n=3, cutoff=0.5)
        raise UnsupportedTarget(
            f"target {str(target)!r}: LLVM knows no processor {cpu.mcpu!r} of {cpu.triple}",
            f"did you mean {', '.join(close)}?" if close else f"e.g. -mcpu={', '.join(known[:8])}",
        )
    return target


def _plain(cpu: Cpu) -> tvm.target.Target:
    return tvm.target.Target({"kind": "llvm", "mtriple": cpu.triple})


def _can_ask(cpu: Cpu) -> bool:
    """Tell whether this LLVM has the architecture: asked about another, it crashes."""
    name = cpu.triple.split("-")[0]
    for pattern, architecture in _ARCHITECTURES:
        if pattern.fullmatch(name):
            name = architecture
    return name in {str(target) for target in codegen.llvm_get_targets()}
