"""The registry of passes: built-ins listed here, third parties through entry points.

A module named in ``BUILTINS`` (or an entry point of the group ``crossloom.passes``) holds ``PASS``, a
:class:`PassInfo`, or ``PASSES``, several.  The core imports none of them until one is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm

from .entry_points import broken_plugins, load_entry_points
from .errors import CrossloomError, UsageError
from .ffi_errors import register_errors as register_errors
from .numerics import REASSOCIATES, Numerics
from .options import PassText, build_options

#: Entry points of third parties' passes.
GROUP = "crossloom.passes"
#: Order in which data flows; a pipeline's passes are in this order.
STAGES = ("canonicalize", "fuse", "quantize", "partition", "lower", "plan", "build")

BUILTINS = (
    "crossloom.passes.match_data_dependent_shapes",
    "crossloom.passes.canonicalize_transformer",
    "crossloom.passes.share_equal_bindings",
    "crossloom.passes.batch_attention_windows",
    "crossloom.passes.lift_cache_stack",
    "crossloom.passes.annotate_semantic_regions",
    "crossloom.passes.fold_batch_norm",
    "crossloom.passes.lower_patch_embedding",
    "crossloom.passes.fuse_cross_modal_embedding",
    "crossloom.passes.fuse_semantic_gate",
    "crossloom.passes.fuse_cross_attention_kv",
    "crossloom.passes.fuse_shared_projections",
    "crossloom.passes.fuse_gated_mlp",
    "crossloom.passes.fold_scale_into_linear",
    "crossloom.passes.fuse_parallel_projections",
    "crossloom.passes.fuse_rotary_projection",
    "crossloom.passes.fuse_rotary_mlp",
    "crossloom.passes.fuse_linear_epilogue",
    "crossloom.passes.fold_norm_into_linear",
    "crossloom.passes.fuse_conv_epilogue",
    "crossloom.passes.fuse_residual_norm",
    "crossloom.passes.fuse_feed_forward",
    "crossloom.passes.fuse_single_linear",
    "crossloom.passes.fuse_attention",
    "crossloom.passes.fuse_cache_append",
    "crossloom.passes.lower_fused_sequence",
    "crossloom.passes.lower_fused_gate",
    "crossloom.passes.lower_fused_feed_forward",
    "crossloom.passes.lower_fused_linear",
    "crossloom.passes.lower_fused_residual_norm",
    "crossloom.passes.lower_fused_conv",
    "crossloom.passes.lower_fused_attention",
    "crossloom.passes.lower_fused_append",
    "crossloom.passes.inline_composites",
    "crossloom.passes.fold_constants",
    "crossloom.passes.accumulate_matmul_fp32",
    "crossloom.passes.legalize_ops",
    "crossloom.passes.schedule_cpu",
)


@dataclass(frozen=True)
class PassInfo:
    """What the library knows of a pass.

    Attributes
    ----------
    name : str
        kebab-case, as written in textual pipelines.
    factory : callable
        Keyword arguments are the fields of ``options`` (and ``target``, where it takes one); returns a TVM pass.
    stage : str
        One of ``STAGES``.
    numerics : Numerics
        What it may do to the numbers.
    options : type or None
        Frozen dataclass of options with defaults.
    targets : tuple of str
        Names of targets it is for; empty means any.
    doc : str
        One line.
    """

    name: str
    factory: Callable[..., tvm.transform.Pass]
    stage: str
    numerics: Numerics
    options: type | None = None
    targets: tuple[str, ...] = ()
    doc: str = ""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise UsageError(f"pass {self.name}: stage {self.stage!r} is not one of {', '.join(STAGES)}")

    def make(self, options: Mapping[str, Any] | None = None, target: Any = None) -> tvm.transform.Pass:
        """Build the pass from options given as values or text.

        Raises
        ------
        UsageError
            For an unknown option or a value of the wrong type, or a pass that cannot be made from text.
        """
        kwargs = build_options(self.name, self.options, options or {})
        if "target" in inspect.signature(self.factory).parameters:
            kwargs["target"] = target
        try:
            return self.factory(**kwargs)
        except CrossloomError:
            raise
        except TypeError as error:
            # TVM's own passes that want arguments have no text form.
            raise UsageError(
                f"pass {self.name} cannot be made from text: {error}", "put it into a Sequential of your own"
            ) from error


_passes: dict[str, PassInfo] = {}
_loaded = False


def _origin(info: PassInfo) -> str:
    """Return where a pass's factory stands: the same after a reload, another for another function or lambda."""
    code = getattr(info.factory, "__code__", None)
    line = f":{code.co_firstlineno}" if code is not None else ""
    return f"{info.factory.__module__}.{info.factory.__qualname__}{line}"


def register(info: PassInfo) -> PassInfo:
    """Add a pass; a second one of the same name from another factory is refused."""
    old = _passes.get(info.name)
    if old is not None and _origin(old) != _origin(info):
        raise UsageError(f"two passes are named {info.name!r}: of {_origin(old)} and of {_origin(info)}")
    _passes[info.name] = info
    return info


def _register_module(owner: Any) -> None:
    if isinstance(owner, PassInfo):
        register(owner)
        return
    if isinstance(owner, (list, tuple)):
        for info in owner:
            register(info)
        return
    for info in getattr(owner, "PASSES", None) or (owner.PASS,):
        register(info)


def _load() -> None:
    global _loaded
    if _loaded:
        return
    for name in BUILTINS:
        _register_module(importlib.import_module(name))
    _loaded = True
    load_entry_points(GROUP, lambda name, owner: _register_module(owner))


def _tvm_pass(name: str) -> PassInfo | None:
    """``relax.Name`` is TVM's own Relax pass of that name, without options."""
    factory = getattr(tvm.relax.transform, name.removeprefix("relax."), None) if name.startswith("relax.") else None
    if factory is None or not callable(factory):
        return None
    doc = (inspect.getdoc(factory) or "").split("\n")[0]
    return PassInfo(name, lambda: factory(), "lower", REASSOCIATES, doc=doc)


def passes() -> dict[str, PassInfo]:
    """Return all registered passes by name."""
    _load()
    return dict(_passes)


def get_pass(name: str) -> PassInfo:
    """Return the pass of that name; ``relax.Xxx`` names TVM's own.

    Raises
    ------
    UsageError
        With the closest names when there is none.
    """
    _load()
    info = _passes.get(name) or _tvm_pass(name)
    if info is None:
        close = difflib.get_close_matches(name, _passes, n=3, cutoff=0.4)
        remedy = f"did you mean {', '.join(close)}?" if close else "`tvmc passes` lists them"
        raise UsageError(f"unknown pass {name!r}", "; ".join(filter(None, (remedy, broken_plugins(GROUP)))))
    return info


def make_pass(text: PassText, target: Any = None) -> tvm.transform.Pass:
    """Build one pass of a textual pipeline."""
    return get_pass(text.name).make(dict(text.options), target)
