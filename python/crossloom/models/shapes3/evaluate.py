"""Held-out accuracy of the shipped fp16 weights through the numpy reference.

``python -m crossloom.models.shapes3.evaluate [--json]``
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from .data import FAMILIES, held_out
from .greedy import Run, generate
from .reference import Reference
from .weights import weights


def measure(run: Run, number: int, seed: int, audio: bool) -> dict[str, object]:
    """Exact-match accuracy over `number` held-out samples, also by family."""
    right: dict[str, list[bool]] = defaultdict(list)
    for sample in held_out(number, seed=seed, audio=audio):
        right[sample.family].append(generate(run, sample) == sample.answer)
    every = [value for values in right.values() for value in values]
    return {
        "n": len(every),
        "right": sum(every),
        "accuracy": sum(every) / len(every),
        "families": {
            name: {"n": len(right[name]), "accuracy": sum(right[name]) / len(right[name])}
            for name in FAMILIES
            if right[name]
        },
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, help="another weight file")
    parser.add_argument("--number", type=int, default=1500, help="samples of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the held-out samples")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    run = Reference(weights(args.weights)).run
    result = {kind: measure(run, args.number, args.seed, audio=kind == "audio") for kind in ("text", "audio")}
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for kind, numbers in result.items():
        print(f"{kind:5s} questions: {numbers['accuracy']:.4f}  ({numbers['right']} of {numbers['n']})")
        families = numbers["families"]
        assert isinstance(families, dict)
        for name, part in families.items():
            print(f"    {name:10s} {part['accuracy']:.4f}  of {part['n']}")


if __name__ == "__main__":
    main()
