"""Recognise what transformers are made of, in every spelling, and outline it into composites that stay executable.

Before: the operators an importer wrote.  After: calls to private functions with ``Composite`` =
``crossloom.rms_norm``, ``crossloom.layer_norm``, ``crossloom.rotary``, ``crossloom.attention``,
``crossloom.gated_mlp``, ``crossloom.mlp``, ``crossloom.linear``, ``crossloom.embedding``,
``crossloom.activation``; each body is the matched lines.  Attributes: see the file of each.

Fires where the meaning is proved.  Never elsewhere: the lines stay, and a verdict says why.

Numerics: reassociates nothing by itself (bodies replay the model's lines); declared ``reassociates`` since a
body is compiled apart.  Linear in the module's size.
"""

from __future__ import annotations

import tvm

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import rewrite_pass

from .canonicalize_activation import activation_rules
from .canonicalize_attention import attention_rules
from .canonicalize_linear import linear_rules
from .canonicalize_mlp import mlp_rules
from .canonicalize_norm import norm_rules
from .canonicalize_rotary import rotary_rules


def CanonicalizeTransformer() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rules = [*norm_rules(), *rotary_rules(), *attention_rules(), *mlp_rules(), *linear_rules(), *activation_rules()]
    return rewrite_pass("canonicalize-transformer", rules)


PASS = PassInfo(
    "canonicalize-transformer",
    CanonicalizeTransformer,
    "canonicalize",
    REASSOCIATES,
    doc="Outline norms, rotary, attention, linear, embedding and activations into composites.",
)
