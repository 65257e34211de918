"""The hook by which `import tvm` finds crossloom (entry-point group ``tvm.backends``).

It imports nothing of ours until a pipeline is asked for: TVM calls it while it is itself being imported, perhaps by
one of our modules.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make ``relax_pipeline="crossloom"`` known to TVM."""
    from tvm import relax

    if "crossloom" in relax.pipeline.PIPELINE_MAP:
        return

    @relax.register_pipeline("crossloom")
    def build(*args: Any, **kwargs: Any) -> Any:
        from .flow import pipeline

        return pipeline(*args, **kwargs)
