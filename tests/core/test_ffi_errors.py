"""An error raised inside a pass keeps its class, message, remedy and exit code."""

from __future__ import annotations

import pytest
import tvm

from crossloom.errors import BudgetExceeded, CrossloomError, ToolchainFailed, UnsupportedModel, UsageError
from crossloom.ffi_errors import register_errors


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedModel("tensor 'x' is a sparse one", "make it dense"),
        UsageError("no such thing"),
        BudgetExceeded("bank B0", 10, 20, [("kv", 15)]),
        ToolchainFailed(["cc", "-c"], -11, "boom\nat line 3"),
    ],
)
def test_through_a_pass(error):
    @tvm.transform.module_pass(opt_level=0, name="raises")
    def run(mod, ctx):
        raise error

    with pytest.raises(type(error)) as caught:
        tvm.transform.Sequential([run])(tvm.ir.IRModule())
    assert (caught.value.message, caught.value.remedy) == (error.message, error.remedy)
    assert caught.value.exit_code == error.exit_code


def test_a_class_defined_later_can_be_made_known():
    class Later(CrossloomError):
        exit_code = 3

    @tvm.transform.module_pass(opt_level=0, name="raises")
    def run(mod, ctx):
        raise Later("late")

    with pytest.raises(RuntimeError, match="late"):
        run(tvm.ir.IRModule())
    register_errors(Later)
    with pytest.raises(Later, match="late"):
        run(tvm.ir.IRModule())
