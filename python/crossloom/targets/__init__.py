"""Targets: what each can run is data, one TOML file a target, with a source for every row."""

from __future__ import annotations

from .compatibility import Compatibility, compatibility
from .load import load_target_file
from .model import Bank, Capability, Cluster, Cpu, Fusion, Npu, Precision, Support, Target, When
from .registry import get_target, list_targets

__all__ = [
    "Bank",
    "Capability",
    "Cluster",
    "Compatibility",
    "Cpu",
    "Fusion",
    "Npu",
    "Precision",
    "Support",
    "Target",
    "When",
    "compatibility",
    "get_target",
    "list_targets",
    "load_target_file",
]
