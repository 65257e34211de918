"""A pass instrument that runs what every pass leaves behind and holds it to the pass's numerics class.

>>> from tvm import relax
>>> bb, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((2, 3), "float32"))
>>> with bb.function("main", [x]):
...     _ = bb.emit_func_output(bb.emit(relax.op.nn.silu(x)))
>>> instrument = NumericsInstrument(seed=1)
>>> with tvm.transform.PassContext(instruments=[instrument]):
...     _ = tvm.transform.Sequential([relax.transform.LegalizeOps(), relax.transform.FuseOps()])(bb.get())
>>> [(r.depth, r.name, r.numerics.kind, r.problem) for r in instrument.records]
[(0, 'sequential', 'composed', ''), (1, 'LegalizeOps', 'reassociates', ''), (1, 'FuseOps', 'reassociates', '')]
>>> instrument.check()
"""

from __future__ import annotations

import math
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

import numpy as np
import tvm
from tvm.ir.instrument import PassInstrument
from tvm_ffi import structural_hash

from ..errors import BudgetExceeded, CrossloomError
from ..ffi_errors import register_errors
from ..numerics import EXACT, REASSOCIATES, Numerics, Violation
from ..verdict import Ledger
from .execution import Call, Executor, HostExecutor, Outputs, as_model, make_calls
from .records import Record, compare, reason
from .stages import contract_of, run_after

#: How many modules' outputs are kept: passes inside of passes start from modules already run.
_KEEP = 12


class NumericsBudgetExceeded(BudgetExceeded):
    """A pass took the error past the instrument's budget.

    TVM carries an error's name and text through its C++, and builds it anew from the text on the other side; the
    numbers are then in the text alone.
    """

    def __init__(self, name: str, wanted: float, had: float, not_run: str = "") -> None:
        super().__init__(f"numerics after pass {name}", wanted, had)
        if not_run:
            CrossloomError.__init__(self, self.message, f"it does not run: {not_run}")


register_errors(NumericsBudgetExceeded)


def compose(parts: Sequence[Numerics]) -> Numerics:
    """Return the class of passes one after the other: their bounds added.

    Examples
    --------
    >>> compose([REASSOCIATES, EXACT, REASSOCIATES]).bound("float32")
    2e-05
    """
    dtypes = {dtype for part in parts for dtype in part.bounds}
    return Numerics("composed", {dtype: sum(part.bound(dtype) for part in parts) for dtype in sorted(dtypes)})


@dataclass(frozen=True)
class _Outcome:
    """What running a module gave: its calls and their outputs, or why it does not run.

    ``borrowed`` says that the calls are those of the module before a pass, not drawn for its own signature.
    """

    calls: tuple[Call, ...]
    outputs: Outputs
    not_run: str = ""
    borrowed: bool = False


@dataclass
class _Running:
    """A pass between its hooks; ``caller`` is the Python call that runs it."""

    name: str
    caller: FrameType
    row: int
    mod: tvm.ir.IRModule
    print_before: int
    before: _Outcome
    ledger: Ledger
    verdicts: int
    began: float = 0.0
    overhead: float = 0.0
    children: list[Numerics] = field(default_factory=list)


class NumericsInstrument(PassInstrument):
    """Runs the module before and after every pass of a ``PassContext`` and records the worst error.

    Works in any flow: a Sequential of your own, TVM's pipelines, ours.  Passes that run other passes have a record
    of their own, before those.  What cannot be run is recorded with the reason, and does not meet a budget.

    Parameters
    ----------
    inputs : mapping of str to arrays, optional
        All parameters of each entry; drawn from ``seed`` for each module when missing.
    seed : int
    lengths : sequence of int or of mapping of str to int
        Values of symbolic dimensions (elements) to draw inputs for.
    contracts : mapping of str to Numerics, optional
        Classes by TVM's name of the pass, before the registry's.
    default : Numerics
        The class of a pass nobody declared.  One that runs other passes is held to their sum besides.
    budget : float, optional
        Largest error of what any outermost pass leaves, against the module the first of them was given.
    execute : Executor, optional
        Where to run; this machine when missing.

    Attributes
    ----------
    records : list of Record
        In the order in which the passes began.

    Raises
    ------
    NumericsBudgetExceeded
        Out of the pass that exceeds the budget, naming it.
    """

    # TVM's objects have no attributes of their own unless told.
    __slots__ = ("__dict__",)

    def __init__(
        self,
        *,
        inputs: Mapping[str, Sequence[np.ndarray]] | None = None,
        seed: int = 0,
        lengths: Sequence[int | Mapping[str, int]] = (3,),
        contracts: Mapping[str, Numerics] | None = None,
        default: Numerics = REASSOCIATES,
        budget: float | None = None,
        execute: Executor | None = None,
    ) -> None:
        self._rows: list[Record | None] = []
        self._stack: list[_Running] = []
        self._inputs, self._seed, self._lengths = inputs, seed, lengths
        self._contracts, self._default, self._budget = dict(contracts or {}), default, budget
        self._execute = execute or HostExecutor()
        self._known: OrderedDict[int, _Outcome] = OrderedDict()
        #: Outputs of the first module, and the fingerprint of the last that an outermost pass left.
        self._original: _Outcome | None = None
        self._chain = 0
        self._overhead = 0.0
        self._ledger: Ledger | None = None
        super().__init__()

    @property
    def records(self) -> list[Record]:
        """Records of the passes that ended."""
        return [row for row in self._rows if row is not None]

    @property
    def violations(self) -> list[tuple[str, Violation]]:
        """Every output outside its pass's class, with the pass's name."""
        return [(record.name, violation) for record in self.records for violation in record.violations]

    def check(self) -> None:
        """Raise AssertionError where a pass left its contract, naming all that did."""
        broken = [f"{r.name} ({r.numerics}): {'; '.join(r.breaches)}" for r in self.records if r.breaches]
        if broken:
            raise AssertionError("passes outside their numerics contract:\n" + "\n".join(broken))

    def run_before_pass(self, mod: tvm.ir.IRModule, info: tvm.transform.PassInfo) -> None:
        """Run the module a pass is given."""
        began = time.perf_counter()
        print_before = structural_hash(mod)
        before = self._outcome(mod, print_before)
        if not self._stack and print_before != self._chain:
            self._original = before
        ledger = Ledger.current()
        if ledger is None:
            ledger = self._ledger = Ledger()
            ledger.__enter__()
        caller = sys._getframe(1)
        frame = _Running(str(info.name), caller, len(self._rows), mod, print_before, before, ledger, len(ledger))
        self._rows.append(None)
        self._stack.append(frame)
        frame.began = time.perf_counter()
        self._overhead += frame.began - began
        frame.overhead = self._overhead

    def run_after_pass(self, mod: tvm.ir.IRModule, info: tvm.transform.PassInfo) -> None:
        """Run what the pass left and compare."""
        began = time.perf_counter()
        # Passes inside, whose error this one survived; they may have its name, but not its caller, which both hooks
        # of a pass are called from.
        while self._stack[-1].caller is not sys._getframe(1) or self._stack[-1].name != str(info.name):
            self._abandon()
        frame = self._stack[-1]
        before, print_after = frame.before, structural_hash(mod)
        changed = print_after != frame.print_before
        after = self._outcome(mod, print_after, before.calls) if changed and not before.not_run else before
        self._close(frame, before, after, changed, began)
        if not self._stack:
            self._chain = print_after
            self._hold_to_budget(frame.name, after)
        self._overhead += time.perf_counter() - began

    def _close(self, frame: _Running, before: _Outcome, after: _Outcome, changed: bool, ended: float) -> None:
        """Take a pass off the stack and write its record."""
        self._stack.pop()
        numerics = self._numerics(frame)
        if self._stack:
            self._stack[-1].children.append(numerics)
        errors: dict[str, float] = {}
        violations: tuple[Violation, ...] = ()
        if not after.not_run:
            errors, violations = compare(numerics, before.calls, before.outputs, after.outputs)
        verdicts = frame.ledger.verdicts[frame.verdicts :]
        fired = sum(v.fired for v in verdicts)
        self._rows[frame.row] = Record(
            name=frame.name,
            numerics=numerics,
            errors=errors,
            violations=violations,
            fault="" if structural_hash(frame.mod) == frame.print_before else "the pass changed its input",
            not_run=f"nor what it was given: {before.not_run}" if before.not_run else after.not_run,
            changed=changed,
            seconds=ended - frame.began - (self._overhead - frame.overhead),
            fired=fired,
            refused=len(verdicts) - fired,
            depth=len(self._stack),
        )
        self._let_go()

    def _abandon(self) -> None:
        """Write the record of the innermost pass, which an error ended."""
        frame = self._stack.pop()
        text = "the pass ended with an error"
        self._rows[frame.row] = Record(frame.name, self._numerics(frame), {}, (), text, text, depth=len(self._stack))
        self._let_go()

    def _let_go(self) -> None:
        """Close the ledger that was opened because there was none."""
        if not self._stack and self._ledger is not None:
            self._ledger.__exit__(None, None, None)
            self._ledger = None

    def exit_pass_ctx(self) -> None:
        """Record the passes an error left open."""
        while self._stack:
            self._abandon()

    def _numerics(self, frame: _Running) -> Numerics:
        declared = self._contracts.get(frame.name) or contract_of(frame.name)
        if declared is not None:
            return declared
        return compose([self._default, *frame.children]) if frame.children else self._default

    def _outcome(self, mod: tvm.ir.IRModule, key: int, calls: Sequence[Call] | None = None) -> _Outcome:
        """Run a module on its own inputs, or on the calls of the module it came from."""
        known = self._known.get(key)
        if known is not None:
            # What does not run on another module's inputs may on its own, and the other way round.
            stale = (known.not_run and known.borrowed) if calls is None else not _same(calls, known.calls)
            if stale:
                known = None
        if known is None:
            known = self._run(mod, calls)
        self._known[key] = known
        self._known.move_to_end(key)
        while len(self._known) > _KEEP:
            self._known.popitem(last=False)
        return known

    def _run(self, mod: tvm.ir.IRModule, calls: Sequence[Call] | None) -> _Outcome:
        asked: Sequence[Call] = calls or ()
        try:
            model = as_model(mod)
            if calls is None:
                asked = make_calls(model, self._inputs, seed=self._seed, lengths=self._lengths)
            return _Outcome(tuple(asked), run_after(self._execute, model, asked), borrowed=calls is not None)
        except Exception as error:  # whatever the compiler raises is the finding
            return _Outcome(tuple(asked), [], reason(error), borrowed=calls is not None)

    def _hold_to_budget(self, name: str, after: _Outcome) -> None:
        first = self._original
        if self._budget is None or first is None or first.not_run:
            return
        if after.not_run:
            total = math.inf
        else:
            total = max(compare(EXACT, first.calls, first.outputs, after.outputs)[0].values(), default=0.0)
        if not total <= self._budget:
            raise NumericsBudgetExceeded(name, self._budget, total, after.not_run)


def _same(left: Sequence[Call], right: Sequence[Call]) -> bool:
    """Whether calls are equal; drawn inputs are, for equal signatures."""
    if [(c.entry, len(c.inputs)) for c in left] != [(c.entry, len(c.inputs)) for c in right]:
        return False
    pairs = [pair for a, b in zip(left, right) for pair in zip(a.inputs, b.inputs)]
    return all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)
