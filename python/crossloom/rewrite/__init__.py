"""The rewriting driver every graph pass is built on."""

from .composite import composite_attrs, composite_name, outline
from .dataflow_pattern import pattern
from .driver import Match, Rule, Site, apply_rules, limit_rewrites, rewrite_pass
from .graph import Graph, children, rebuild

__all__ = [
    "Graph",
    "Match",
    "Rule",
    "Site",
    "apply_rules",
    "children",
    "composite_attrs",
    "composite_name",
    "limit_rewrites",
    "outline",
    "pattern",
    "rebuild",
    "rewrite_pass",
]
