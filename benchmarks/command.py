"""What the benchmarks' commands have in common: ``--json FILE``, ``--check``, and how they end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows ``--json`` and ``--check``, described by the first line of a docstring."""
    out = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else "")
    out.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured")
    out.add_argument("--check", action="store_true", help="exit 1, naming what falls short of the figures asked")
    return out


def finish(args: argparse.Namespace, report: Any, shortfalls: Callable[[], Sequence[str]]) -> int:
    """Write the report where one is asked for, name what falls short where that is, and return the exit code."""
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    missing = shortfalls() if args.check else []
    for line in missing:
        print(f"short: {line}", file=sys.stderr)
    return 1 if missing else 0
