"""Our errors keep their class on the way through TVM: a pass raises one, and whoever ran the pass catches it.

TVM carries an exception as a name and a text; a name it does not know comes back as a plain ``RuntimeError``.
"""

from __future__ import annotations

import tvm_ffi

from .errors import CrossloomError


def _reviver(cls: type[CrossloomError]) -> type:
    """Return a type that, called with a text as TVM does, makes an error of ``cls``, whose constructor takes more."""
    return type(cls.__name__, (), {"__new__": lambda reviver, text: cls.revive(text)})


def register_errors(base: type[CrossloomError] = CrossloomError) -> None:
    """Make an error class and all below it known to TVM; call it again after defining one."""
    for cls in (base, *base.__subclasses__()):
        name = f"crossloom.{cls.__name__}"
        tvm_ffi.register_error(name, cls)
        tvm_ffi.register_error(name, _reviver(cls))
        if cls is not base:
            register_errors(cls)


register_errors()
