"""What every pass owes, held over the registry: golden IR, refusals, a property, idempotence, every entry."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from crossloom.registry import BUILTINS, passes

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "passes"
STEMS = [name.rsplit(".", 1)[-1] for name in BUILTINS]


def _imported(path: Path, seen: set[Path]) -> set[Path]:
    """Return a pass file and the files of its room that it is made of."""
    if path in seen:
        return seen
    seen.add(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            _imported(path.parent.joinpath(*node.module.split(".")).with_suffix(".py"), seen)
    return seen


def _sources(stem: str) -> set[Path]:
    return _imported(ROOT / "passes" / f"{stem}.py", set())


def _tests(stem: str) -> list[Path]:
    """Return the test files of a pass: its own, and those of the files it is made of."""
    stems = {path.stem for path in _sources(stem)}
    return [path for path in sorted(TESTS.rglob("test_*.py")) if any(path.stem.startswith(f"test_{s}") for s in stems)]


def _functions(stem: str) -> dict[str, str]:
    """Return the source of every test function by name."""
    out = {}
    for path in _tests(stem):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                out[f"{path.name}::{node.name}"] = ast.get_source_segment(text, node) or ""
    return out


def _codes(stem: str) -> set[str]:
    """Return the refusal codes that a pass can give."""
    out = set()
    for path in _sources(stem):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refuse" and node.args:
                code = node.args[0]
                parts = [code.body, code.orelse] if isinstance(code, ast.IfExp) else [code]
                for part in parts:
                    assert isinstance(part, ast.Constant), f"{path.name}:{node.lineno}: the code is not a literal"
                    out.add(part.value)
    return out


def test_the_registry_names_a_pass_as_its_file_and_tvm_do():
    ours = {name: info for name, info in passes().items() if info.factory.__module__.startswith("crossloom.passes.")}
    assert {name.replace("-", "_") for name in ours} == set(STEMS)
    for name, info in ours.items():
        assert info.make().info.name == name
        assert info.factory.__module__ == f"crossloom.passes.{name.replace('-', '_')}"
        assert info.factory.__name__.lower() == name.replace("-", "")


@pytest.mark.parametrize("stem", STEMS)
def test_it_is_documented(stem):
    text = (ROOT / "passes" / f"{stem}.py").read_text()
    doc = ast.get_docstring(ast.parse(text)) or ""
    for word in ("Fires", "Never", "Numerics"):
        assert re.search(rf"\b{word}\b", doc), f"{stem}.py does not say: {word}"


@pytest.mark.parametrize("stem", STEMS)
def test_it_has_a_golden_test(stem):
    golden = [n for n, s in _functions(stem).items() if "golden" in n and "assert_structural_equal" in s]
    assert golden, f"no test of {stem} named *golden* compares Before with Expected"


@pytest.mark.parametrize("stem", STEMS)
def test_each_refusal_has_a_test(stem):
    text = "\n".join(path.read_text() for path in _tests(stem))
    missing = sorted(code for code in _codes(stem) if f'"{code}"' not in text)
    assert not missing, f"no test of {stem} sees the refusals {', '.join(missing)}"


@pytest.mark.parametrize("stem", STEMS)
def test_it_has_a_property_test(stem):
    assert any("assert_pass_preserves(" in s for s in _functions(stem).values()), f"{stem} has no property test"


@pytest.mark.parametrize("stem", STEMS)
def test_running_it_twice_is_tested(stem):
    twice = [n for n, s in _functions(stem).items() if "twice" in n and ("same_as" in s or "structural_equal" in s)]
    assert twice, f"no test of {stem} named *twice* runs it twice"


@pytest.mark.parametrize("stem", STEMS)
def test_every_entry_is_tested(stem):
    # A module with two entries that a user would have.
    text = "\n".join(path.read_text() for path in _tests(stem))
    assert re.search(r"\b(vision|audio|prefill)\b", text) and "decode" in text, f"{stem}: no module of two entries"
