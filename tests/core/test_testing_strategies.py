"""Each strategy agrees with its numpy reference at every length, and draws what it says it draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax

from crossloom.testing import HostExecutor, as_model, make_calls, strategies
from crossloom.testing.strategies import Case

MODULES: dict[str, Callable[[], st.SearchStrategy[Case]]] = {
    name: getattr(strategies, name)
    for name in strategies.__all__
    if name not in ("CONVENTIONS", "Case", "Input", "build", "modules", "rotary")
}
MODULES |= {f"rotary {name}": lambda name=name: strategies.rotary(name) for name in strategies.CONVENTIONS}


def each(strategy: st.SearchStrategy[Case], examples: int, test: Callable[[Case], None]) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(case: Case) -> None:
        test(case)

    run()


@pytest.mark.parametrize("name", MODULES)
def test_agrees_with_its_reference(name: str) -> None:
    def agrees(case: Case) -> None:
        model = as_model(case.mod)
        calls = make_calls(model, seed=1, lengths=case.sizes)
        for call, outputs in zip(calls, HostExecutor()(model, calls)):
            expected = case.references[call.entry](list(call.inputs))
            assert len(outputs) == len(expected)
            for got, want in zip(outputs, expected):
                assert got.shape == want.shape and str(got.dtype) == case.dtype
                tolerance = 2e-2 if case.dtype == "float16" else 1e-5
                np.testing.assert_allclose(got.astype("float64"), want, atol=tolerance, rtol=tolerance)

    each(MODULES[name](), 4, agrees)


def is_array(expr: relax.Expr) -> bool:
    return isinstance(expr, type(relax.const(1.0))) and expr.value.numpy().ndim > 0


def _seen(name: str, examples: int) -> set[str]:
    """What some examples of a strategy show, without building any."""
    seen: set[str] = set()

    def look(case: Case) -> None:
        seen.add(case.dtype)
        entries = as_model(case.mod).entries
        seen.add(f"{len(entries)} entries")
        for length in case.sizes:
            seen.add(f"length {length['n']}" if "n" in length else "static")
        for entry in entries:
            func = case.mod[entry]
            fields = list(func.body.body.fields) if isinstance(func.body.body, relax.Tuple) else []
            seen.add("nested" if any(isinstance(f, relax.Tuple) for f in fields) else "flat")
            if len(set(fields)) < len(fields):
                seen.add("duplicate")
            constants: list[relax.Expr] = []
            relax.analysis.post_order_visit(func, lambda e, found=constants: found.append(e) if is_array(e) else None)
            seen.add("constant weight" if constants else "weights given")

    each(MODULES[name](), examples, look)
    return seen


@pytest.mark.parametrize("name", ["linear", "rms_norm"])
def test_draws_what_passes_forget(name: str) -> None:
    wanted = {"float32", "float16", "1 entries", "2 entries", "static", "length 0", "length 1", "length 3"}
    wanted |= {"nested", "flat", "duplicate", "constant weight", "weights given"}
    assert wanted <= _seen(name, 40)


def test_attention_draws_groups_masks_and_two_lengths() -> None:
    seen: set[str] = set()

    def look(case: Case) -> None:
        q, k, v, *mask = (param.ty for param in case.mod["main"].params)
        seen.add("grouped" if int(q.shape[1]) > int(k.shape[1]) else "alike")
        seen.add("wider values" if int(v.shape[3]) > int(k.shape[3]) else "other values")
        seen.add(str(mask[0].dtype) if mask else "no mask")
        seen.add("two lengths" if str(q.shape[2]) != str(k.shape[2]) else "one length")
        ops = str(case.mod.script(show_meta=False))
        seen.add("causal" if "R.triu" in ops else "open")

    each(strategies.attention(), 60, look)
    assert {"grouped", "alike", "wider values", "bool", "no mask", "two lengths", "one length", "causal"} <= seen
    assert {"float32", "float16"} & seen


def test_unknown_convention() -> None:
    with pytest.raises(ValueError, match="half-split, interleaved, 2-d, m-rope"):
        each(strategies.rotary("spiral"), 1, lambda case: None)
