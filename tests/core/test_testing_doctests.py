"""The examples in the docstrings of the public API run and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import crossloom.testing

TESTING = ["crossloom.testing"] + [
    f"crossloom.testing.{module.name}" for module in pkgutil.iter_modules(crossloom.testing.__path__)
]
CORE = ["crossloom.verdict", "crossloom.options", "crossloom.numerics"]
#: Modules with examples; a name that loses them fails.
WITH_EXAMPLES = {"crossloom.testing", *CORE} | {
    f"crossloom.testing.{name}"
    for name in ("instrument", "records", "references", "runner", "stages", "strategies", "verify")
}


@pytest.mark.parametrize("name", [*TESTING, *CORE])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert (result.attempted > 0) == (name in WITH_EXAMPLES)


def test_every_module_is_looked_at() -> None:
    assert set(TESTING) | set(CORE) >= WITH_EXAMPLES
