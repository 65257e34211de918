"""Compiling a model: run a pipeline over it pass by pass, keep the ledger, build the executable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import relax

from .errors import CrossloomError, UnsupportedModel, UsageError
from .flow import resolve_target, steps, vm_lowering
from .fold_weights import fold_weights
from .importers.implied_sizes import bind_implied_sizes
from .model import Model
from .options import format_pipeline
from .verdict import Ledger

#: Weights are folded once composites are plain operators again, and while these are still Relax operators.
FOLD_AFTER = "inline-composites"


@dataclass
class Compiled:
    """What compiling gives.

    Attributes
    ----------
    executable : tvm.relax.VMExecutable or None
        None where only the passes were asked for.
    model : Model
        The model as built: its module before the virtual machine's lowering, its weights as the entries take them.
    target : tvm.target.Target
    ledger : Ledger
    pipeline : str
        Text of the passes that ran.
    seconds : dict of str to float
        Wall time by pass.
    """

    executable: Any
    model: Model
    target: tvm.target.Target
    ledger: Ledger
    pipeline: str
    seconds: dict[str, float] = field(default_factory=dict)


def compile_model(
    model: Model,
    target: Any,
    *,
    text: str | None = None,
    disabled: Iterable[str] = (),
    pass_config: Mapping[str, Any] | None = None,
    on_pass: Callable[[str], None] = lambda name: None,
    build: bool = True,
) -> Compiled:
    """Compile a model for a target.

    Parameters
    ----------
    model : Model
    target : crossloom.targets.Target, tvm.target.Target or str
    text : str or None
        Textual pipeline instead of the target's own.
    disabled : iterable of str
        Passes to leave out.
    pass_config : mapping
        TVM's ``PassContext`` configuration.
    on_pass : callable
        Told each pass's name before it runs, for progress.
    build : bool
        False runs the passes and leaves out machine code.

    Raises
    ------
    UnsupportedModel
        Naming the pass in which TVM gave up, with its last line.
    UsageError
        For an unknown pass or option, or a pass configuration that TVM refuses.
    """
    tvm_target = resolve_target(target)
    if tvm_target is None:
        raise UsageError("no target given")
    chosen = steps(target, text, disabled)
    model = bind_implied_sizes(model)
    seconds: dict[str, float] = {}
    mod = model.mod
    step_name = ""
    try:
        context = tvm.transform.PassContext(config=dict(pass_config or {}))
    except Exception as error:
        raise UsageError(f"pass configuration: {str(error).strip().splitlines()[-1]}") from error
    with Ledger() as ledger, context, tvm_target:
        try:
            for step in chosen:
                step_name = str(step.text)
                on_pass(step_name)
                start = time.perf_counter()
                mod = step.run(mod)
                seconds[step.text.name] = seconds.get(step.text.name, 0.0) + time.perf_counter() - start
                if step.text.name == FOLD_AFTER:
                    step_name = "fold-weights"
                    on_pass(step_name)
                    start = time.perf_counter()
                    model = fold_weights(replace(model, mod=mod))
                    mod = model.mod
                    seconds[step_name] = time.perf_counter() - start
            executable = None
            if build:
                step_name = "build"
                on_pass(step_name)
                start = time.perf_counter()
                executable = relax.build(mod, tvm_target, relax_pipeline=tvm.transform.Sequential(list(vm_lowering())))
                seconds["build"] = time.perf_counter() - start
        except CrossloomError:
            raise
        except Exception as error:
            last = [line for line in str(error).strip().splitlines() if line.strip()]
            raise UnsupportedModel(
                f"pass {step_name} failed on {model.name}: {type(error).__name__}: {last[-1] if last else ''}",
                "leave it out with --disabled-pass, or run `tvmc verify --bisect`",
            ) from error
    built = replace(model, mod=mod)
    return Compiled(executable, built, tvm_target, ledger, format_pipeline([s.text for s in chosen]), seconds)
