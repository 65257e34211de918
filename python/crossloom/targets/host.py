"""The machine we run on, as a target."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import tvm
from tvm.target import codegen

from .model import Cpu, Target

#: x86 extensions a virtual machine may hide although the processor's model has them (LLVM's name: Linux's).
_HIDEABLE = {
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512cd": "avx512cd",
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16",
}


def _hidden(mcpu: str) -> tuple[str, ...]:
    """Return ``-feature`` for what LLVM believes of the model but the kernel does not report."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.is_file():
        return ()
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    believed = codegen.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": mcpu}))
    return tuple(sorted(f"-{name}" for name, flag in _HIDEABLE.items() if name in believed and flag not in flags))


@lru_cache(maxsize=1)
def host_cpu() -> Cpu:
    """Return this machine's processor; the same on every call and, on one machine, in every process."""
    mcpu, triple = codegen.llvm_get_system_cpu(), codegen.llvm_get_system_triple()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu = Cpu("llvm", "asked of LLVM and of the operating system", triple, mcpu, _hidden(mcpu), cores)
    bits = codegen.llvm_get_vector_width(Target("host", "", "host", cpu).tvm_target())
    return replace(cpu, vector_bytes=bits // 8)


def with_host_cpu(target: Target) -> Target:
    """Fill in the processor of the ``host`` target."""
    return replace(target, cpu=host_cpu())
