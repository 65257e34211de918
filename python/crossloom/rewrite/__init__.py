"""The rewriting driver every graph pass is built on."""

from .composite import composite_attrs, composite_name, outline
from .dataflow_pattern import pattern
from .driver import Match, Rule, Site, apply_rules, limit_rewrites, rewrite_pass, root_name
from .graph import Graph, children, per_graph, rebuild
from .grouping import GroupRule, apply_groups, group_pass, region_of, unknown_size
from .splice import splice

__all__ = [
    "Graph",
    "GroupRule",
    "Match",
    "Rule",
    "Site",
    "apply_groups",
    "apply_rules",
    "children",
    "composite_attrs",
    "composite_name",
    "group_pass",
    "limit_rewrites",
    "outline",
    "pattern",
    "per_graph",
    "rebuild",
    "region_of",
    "rewrite_pass",
    "root_name",
    "splice",
    "unknown_size",
]
