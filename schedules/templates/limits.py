"""What a target's table says of a chain: the strictest row that allows it, or which one does not."""

from __future__ import annotations

from collections.abc import Sequence

import tvm

from crossloom.targets import Fusion, Target, list_targets
from crossloom.verdict import Verdict, refuse


def admitted(operators: Sequence[str], length: int, rows: Sequence[Fusion], kind: str) -> Fusion | Verdict:
    """Return the strictest of a table's rows that all allow a chain, or a refusal that names the one which does not.

    Parameters
    ----------
    operators : sequence of str
    length : int
        How many of them count: those between load and store, or behind the sums.
    rows : sequence of Fusion
        Of one kind and unit.
    kind : str
        For the refusal where there are no rows.
    """
    if not rows:
        return refuse("no-limit-known", kind, "the target's table has no fusion row for such chains")
    for row in rows:
        for name in operators:
            if row.operators and name not in row.operators:
                return refuse(
                    "operator-not-in-table", name, f"not among those that may be in a {kind} chain: {row.source}"
                )
        if row.most and length > row.most:
            return refuse("chain-too-long", f"{length} operators", f"at most {row.most}: {row.source}")
    return min(rows, key=lambda row: row.most or 1 << 30)


def target_of(target: tvm.target.Target) -> Target:
    """Return the known target whose table speaks of a TVM target: of its processor, else of its architecture.

    A TVM target carries no table.  Where no known target has its architecture, the host's is taken.
    """
    known = list_targets()
    attrs = target.attrs
    triple, mcpu = (str(attrs.get(key, "")) for key in ("mtriple", "mcpu"))
    alike = [
        t
        for t in known.values()
        if t.name != "host"
        and t.cpu.kind == str(target.kind)
        and (t.cpu.kind == "c" or _arch(t.triple) == _arch(triple))
    ]
    return min(alike, key=lambda t: (t.cpu.mcpu != mcpu, t.name), default=known["host"])


def _arch(triple: str) -> str:
    arch = triple.split("-")[0]
    return "aarch64" if arch == "arm64" else arch
