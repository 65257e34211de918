"""crossloom: compiler passes for Apache TVM that take multimodal models to edge devices."""

from __future__ import annotations

__version__ = "0.1.0"
