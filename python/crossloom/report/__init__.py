"""Report pages: one HTML file that holds its pictures and styles, and pictures for terminals."""

from __future__ import annotations

from .page import Picture, Report, Section, Table, render, write_report
from .picture import encode_png, half_blocks

__all__ = ["Picture", "Report", "Section", "Table", "encode_png", "half_blocks", "render", "write_report"]
