"""shapes3, a trained image, text and audio model, compiled for this machine and for RK3588's Arm cores, run and
verified: ``python -m benchmarks.demo``.

Read :func:`demo` from top to bottom for a tour: load, compile (by Python and by ``tvmc``), run, ask, compare, report.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The reference multiplies small matrices; numpy's threads only get in the way of each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.fidelity import Answers, answer, entry_errors, pass_effects, record_calls, token_agreement
from crossloom.atomic import write_bytes
from crossloom.bundle import Bundle, write_bundle
from crossloom.driver import compile_model
from crossloom.errors import CrossloomError, ToolchainFailed
from crossloom.importers.load import load_model
from crossloom.models import shapes3
from crossloom.models.shapes3 import Sample
from crossloom.report import Picture, Report, Section, Table, encode_png, half_blocks, write_report
from crossloom.runtime import Session, open_session
from crossloom.targets import get_target
from crossloom.verdict import Ledger

ENTRIES = ("vision", "audio", "embed", "prefill", "decode")
#: What ``--check`` asks: share of equal tokens, and the worst normwise error of an entry, wherever it runs.
TOKENS_EQUAL, ENTRY_ERROR = 0.99, 1e-3
#: Where time is emulated, it says so.
EMULATED = "rk3588 under QEMU (emulation, not the board's speed)"
BOARD = "shapes3-rk3588"

#: Wide where it goes to a file, so that tables stay readable.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def demo(output: Path, samples: int = 100, emulated: int = 3, device: str = "all") -> dict[str, Any]:
    """Run the demonstration.

    Parameters
    ----------
    output : Path
        Folder for the two bundles and the page; created.
    samples : int
        Written questions to ask; half as many spoken ones.
    emulated : int
        Questions to ask under QEMU, written and spoken in turn.
    device : str
        ``"all"``, ``"host"`` or ``"qemu"``: where the compiled model answers; "host" leaves the Arm build out,
        "qemu" asks the questions under QEMU only.

    Returns
    -------
    dict
        Everything measured, as JSON can hold it.
    """
    result: dict[str, Any] = {"samples": {"text": samples, "audio": (samples + 1) // 2}}

    step("1. Load: six ONNX graphs become one module with five entries")
    description = shapes3.path() / "shapes3.toml"
    model = load_model(description)
    for entry in model.entries.values():
        ins, outs = (", ".join(f"{s.name}{_shape(s.shape)}" for s in side) for side in (entry.inputs, entry.outputs))
        console.print(f"  {entry.name} [{entry.modality}]: {ins} -> {outs}", markup=False)

    bundles: dict[str, Path] = {}
    if device in ("all", "host"):
        step("2. Compile for this machine, in Python")
        compiled = compile_model(model, get_target("host"))
        bundles["host"] = write_bundle(
            output / "shapes3-host",
            executable=compiled.executable,
            model=compiled.model,
            target=compiled.target,
            target_name="host",
            extras={
                "ledger.json": compiled.ledger.to_json().encode(),
                "pipeline.txt": compiled.pipeline.encode(),
                "seconds.json": json.dumps(compiled.seconds).encode(),
            },
        )
        console.print(f"  passes: {compiled.pipeline}", markup=False)
    if device in ("all", "qemu"):
        step("3. Compile for RK3588's Arm cores, with tvmc")
        bundles["qemu"] = output / BOARD
        tvmc("compile", str(description), "--target", "rk3588", "-o", str(bundles["qemu"]))
    result["bundles"] = {name: describe(path) for name, path in bundles.items()}

    written = shapes3.held_out(samples)
    spoken = shapes3.held_out((samples + 1) // 2, audio=True)
    shown = (spoken or written)[0]
    calls = record_calls(shapes3.reference.run, [*written[:1], *spoken[:1]])
    sessions: dict[str, Session] = {}
    try:
        for name, path in bundles.items():
            sessions[name] = open_session(path, "host" if name == "host" else "qemu")

        step("4. Ask about one drawing")
        result["shown"] = {"question": written[0].question, "expected": written[0].answer}
        console.print(half_blocks(written[0].image))
        for name, session in sessions.items():
            result["shown"][name] = shapes3.generate(session.run, written[0])
            result["shown"][f"{name}, spoken"] = shapes3.generate(session.run, shown)
            place = "this machine" if name == "host" else "Arm under QEMU"
            console.print(f"  {written[0].question}  ->  {result['shown'][name]}   ({place}, written)", markup=False)
            console.print(
                f"  {shown.question}  ->  {result['shown'][f'{name}, spoken']}   ({place}, spoken)", markup=False
            )

        step("5. Answers and tensors against the numpy reference")
        result["answers"] = answers(sessions, written, spoken, emulated)
        result["errors"] = {name: entry_errors(s.run, shapes3.reference.run, calls) for name, s in sessions.items()}
        result["times_ms"] = times(sessions, dict(calls))
        tables = measured_tables(result)
        for table in tables.values():
            show(table)
    finally:
        for session in sessions.values():
            session.close()

    step("6. What each pass changed, on this machine")
    # One call an entry: the first is enough to see what a pass does to its numbers.
    first = {entry: (entry, inputs) for entry, inputs in reversed(calls)}
    began = time.perf_counter()
    effects = pass_effects(model, get_target("host"), list(first.values()), lambda name: say(f"  {name}", began))
    result["passes"] = {name: vars(effect) for name, effect in effects.items()}

    for name, path in bundles.items():
        with Bundle.open(path) as bundle:
            tables |= pass_tables(result, name, Ledger.from_json(bundle.read("ledger.json").decode()))
        show(tables[f"passes {name}"])
    page = make_report(result, tables, encode_png(written[0].image))
    console.print(f"\nreport: {write_report(page, output / 'report.html')}", markup=False)
    return result


def answers(
    sessions: Mapping[str, Session], written: Sequence[Sample], spoken: Sequence[Sample], emulated: int
) -> list[dict[str, Any]]:
    """Return accuracy and token agreement by device and kind of question."""
    reference = {"text": answer(shapes3.reference.run, written), "audio": answer(shapes3.reference.run, spoken)}
    rows = []
    for name, session in sessions.items():
        for kind, asked in (("text", written), ("audio", spoken)):
            few = (emulated + (kind == "text")) // 2
            part = asked if name == "host" else asked[:few]
            if part:
                theirs = _first(reference[kind], part)
                ours = answer(session.run, part)
                rows.append(
                    {
                        "device": name,
                        "question": kind,
                        "n": len(part),
                        "right": ours.right,
                        "reference_right": theirs.right,
                        "accuracy": ours.accuracy,
                        "reference_accuracy": theirs.accuracy,
                        "tokens_equal": token_agreement(ours, theirs),
                        "seconds_per_answer": ours.seconds / len(part),
                    }
                )
    return rows


def _first(given: Answers, asked: Sequence[Sample]) -> Answers:
    """Return the reference's answers to the first questions."""
    texts = given.texts[: len(asked)]
    right = sum(t == s.answer for t, s in zip(texts, asked))
    return Answers(texts, given.tokens[: len(asked)], right, given.seconds)


def times(sessions: Mapping[str, Session], inputs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return milliseconds of one call by entry: the fastest of a few, for the reference and on each device."""
    out: dict[str, dict[str, float]] = {}
    for entry in ENTRIES:
        if entry not in inputs:
            continue
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            shapes3.reference.run(entry, inputs[entry])
            taken.append(time.perf_counter() - start)
        out[entry] = {"reference": 1000 * min(taken)}
        for name, session in sessions.items():
            repeat = 5 if name == "host" else 1
            out[entry][name] = 1000 * min(session.time(entry, inputs[entry], repeat=repeat))
    return out


def describe(path: Path) -> dict[str, Any]:
    """Return what a bundle holds: sizes in bytes, seconds by pass, and counts of verdicts."""
    with Bundle.open(path) as bundle:
        ledger = Ledger.from_json(bundle.read("ledger.json").decode())
        counts: dict[str, dict[str, int]] = {}
        for verdict in ledger:
            row = counts.setdefault(verdict.pass_name, {"fired": 0, "refused": 0})
            row["fired" if verdict.fired else "refused"] += 1
        return {
            "target": bundle.manifest.target,
            "arch": bundle.manifest.arch,
            "bytes": {part.path: part.size_bytes for part in bundle.manifest.parts},
            "seconds": json.loads(bundle.read("seconds.json")),
            "verdicts": counts,
        }


def measured_tables(result: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of answers, errors, times and sizes."""
    names = {"host": "this machine", "qemu": EMULATED}
    used = [n for n in names if n in result["bundles"]]
    return {
        "answers": Table(
            "Answers, compiled against reference",
            ("device", "question", "asked", "right", "reference right", "accuracy", "tokens equal", "s per answer"),
            [
                (
                    names[r["device"]],
                    r["question"],
                    r["n"],
                    r["right"],
                    r["reference_right"],
                    r["accuracy"],
                    r["tokens_equal"],
                    r["seconds_per_answer"],
                )
                for r in result["answers"]
            ],
        ),
        "errors": Table(
            "Worst error by entry, as a fraction of the reference's largest magnitude",
            ("entry", *(names[n] for n in used)),
            [(e, *(result["errors"][n].get(e) for n in used)) for e in ENTRIES if e in result["times_ms"]],
        ),
        "times": Table(
            "Milliseconds a call",
            ("entry", "numpy reference", *(names[n] for n in used)),
            [(e, row["reference"], *(row[n] for n in used)) for e, row in result["times_ms"].items()],
        ),
        "sizes": Table(
            "Sizes in bytes",
            ("bundle", "file", "bytes"),
            [(b["target"], f, n) for b in result["bundles"].values() for f, n in b["bytes"].items()],
        ),
    }


def pass_tables(result: Mapping[str, Any], name: str, ledger: Ledger) -> dict[str, Table]:
    """Return the tables of a build's passes and of its ledger."""
    described = result["bundles"][name]
    rows = []
    for step_name, seconds in described["seconds"].items():
        verdicts = described["verdicts"].get(step_name, {})
        effect: Mapping[str, Any] = next(
            (v for k, v in result["passes"].items() if k.partition("{")[0] == step_name), {}
        )
        counts = (verdicts.get("fired"), verdicts.get("refused"))
        rows.append((step_name, seconds, *counts, *(effect.get(k) for k in ("changed", "error", "contract", "within"))))
    return {
        f"passes {name}": Table(
            f"Passes of the {described['target']} build (errors: measured on this machine, against the pass before)",
            ("pass", "seconds", "rewrites made", "refused", "changed", "worst error", "contract", "kept"),
            rows,
            bar="seconds",
        ),
        f"ledger {name}": Table(
            f"Ledger of the {described['target']} build",
            ("pass", "rewrite", "function", "site", "verdict", "culprit", "detail", "bytes saved", "MACs"),
            [
                (v.pass_name, v.rewrite, v.function, v.site, v.code, v.culprit, v.detail, v.bytes_saved, v.macs)
                for v in ledger
            ],
            folded=True,
        ),
    }


def make_report(result: Mapping[str, Any], tables: Mapping[str, Table], png: bytes) -> Report:
    """Return the page."""
    shown = result["shown"]
    said = ", ".join(f"{k}: “{v}”" for k, v in shown.items() if k not in ("question", "expected"))
    caption = f"{shown['question']} Expected: {shown['expected']}. Answered: {said}."
    passes = [table for name, table in tables.items() if name.startswith("passes ")]
    ledgers = [table for name, table in tables.items() if name.startswith("ledger ")]
    return Report(
        "shapes3, compiled and verified",
        "A trained image, text and audio model, compiled by crossloom, and what became of its numbers on the way.",
        [
            Section("One drawing, one question", pictures=[Picture(png, caption)]),
            Section("Answers", "Held-out questions, answered greedily.", tables=[tables["answers"]]),
            Section("Numbers", "The same inputs through both.", tables=[tables["errors"]]),
            Section(
                "Times",
                "QEMU interprets each Arm instruction; its times say nothing of a board's.",
                tables=[tables["times"]],
            ),
            Section("Passes", tables=passes),
            Section("Sizes", tables=[tables["sizes"]]),
            Section("Ledger", "Every rewrite that was made or refused, and why.", tables=ledgers),
        ],
    )


def shortfalls(result: Mapping[str, Any]) -> list[str]:
    """Return what ``--check`` finds wrong."""
    out = []
    for row in result["answers"]:
        where = f"{row['device']}, {row['question']}"
        if row["right"] != row["reference_right"]:
            out.append(f"{where}: {row['right']} of {row['n']} right, the reference has {row['reference_right']}")
        if row["tokens_equal"] < TOKENS_EQUAL:
            out.append(
                f"{where}: {row['tokens_equal']:.2%} of the tokens equal the reference's, not {TOKENS_EQUAL:.0%}"
            )
    for name, errors in result["errors"].items():
        out += [
            f"{name}, {entry}: error {error:.3g} > {ENTRY_ERROR:g}"
            for entry, error in errors.items()
            if not error <= ENTRY_ERROR
        ]
    out += [
        f"pass {k}: error {p['error']:.3g} breaks {p['contract']}"
        for k, p in result["passes"].items()
        if not p["within"]
    ]
    return out


def tvmc(*args: str) -> None:
    """Run ``tvmc`` in a process of its own and show the command."""
    console.print("  $ " + " ".join(["tvmc", *args]), style="bold", markup=False, soft_wrap=True)
    command = [sys.executable, "-m", "crossloom.cli.main", *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0:
        raise ToolchainFailed(["tvmc", *args], done.returncode, done.stdout)
    for line in done.stdout.strip().splitlines()[-1:]:
        console.print(f"  {line}", markup=False)


def say(text: str, began: float) -> None:
    """Print a line with the seconds since `began`."""
    console.print(f"{text} ({time.perf_counter() - began:.0f} s)", style="dim", markup=False)


def step(title: str) -> None:
    """Print a heading."""
    console.print(f"\n{title}", style="bold cyan", markup=False)


def show(table: Table) -> None:
    """Print a table of the report."""
    from crossloom.report.page import cell_text

    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        drawn.add_column(column, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell_text(value)) for value in row))
    console.print(f"\n{table.caption}", style="bold", markup=False)
    console.print(drawn)


def _shape(shape: tuple[int | str, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compile, run and verify shapes3.")
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of the bundles and the page")
    parser.add_argument("--samples", type=int, default=100, help="written questions; half as many spoken ones")
    parser.add_argument("--emulated", type=int, default=3, help="questions under QEMU")
    parser.add_argument("--device", choices=("all", "host", "qemu"), default="all", help="where the model answers")
    parser.add_argument("--json", type=Path, help="also write what was measured", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the compiled model equals the reference")
    args = parser.parse_args()
    if args.samples < 1 or args.emulated < 1:
        parser.error("--samples and --emulated must be at least 1")
    start = time.perf_counter()
    try:
        result = demo(args.output, args.samples, args.emulated, args.device)
        if args.json:
            write_bytes(args.json, json.dumps(result, indent=1).encode())
    except CrossloomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    wrong = shortfalls(result)
    for line in wrong:
        print(f"shortfall: {line}", file=sys.stderr)
    console.print(f"{time.perf_counter() - start:.0f} s in all")
    return 1 if args.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
