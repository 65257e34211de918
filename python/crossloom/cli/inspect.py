"""``tvmc inspect``: what a bundle holds."""

from __future__ import annotations

import json
from typing import Any

from . import arguments as args
from .console import print_json, print_table, progress, size_text


def command(bundle: args.BundlePath, as_json: args.Json = False) -> None:
    """Show what a bundle holds: target, entries, regions, weights, files, passes; every file is checked."""
    with progress("checking the bundle"):
        from crossloom.bundle import Bundle

        with Bundle.open(bundle) as opened:
            manifest = opened.manifest
            parts = {part.path for part in manifest.parts}
            pipeline = opened.read("pipeline.txt").decode().strip() if "pipeline.txt" in parts else ""
            regions = json.loads(opened.read("regions.json")) if "regions.json" in parts else {}
            seconds = json.loads(opened.read("seconds.json")) if "seconds.json" in parts else {}
            stored = {manifest.weights[name]: int(value.nbytes) for name, value in opened.weights.items()}
    if as_json:
        report: dict[str, Any] = json.loads(manifest.to_json())
        report |= {"pipeline": pipeline, "regions": regions, "seconds": seconds, "weight_bytes": sum(stored.values())}
        print_json(report)
        return
    versions = ", ".join(f"{k} {v}" for k, v in manifest.versions.items())
    rows = [
        ("model", manifest.name),
        ("target", f"{manifest.target} ({manifest.arch})"),
        ("TVM target", json.dumps(dict(manifest.tvm_target))),
        ("written by", versions),
        ("pipeline", pipeline or "not recorded"),
        ("weights", f"{len(manifest.weights)} names, {len(stored)} tensors, {size_text(sum(stored.values()))}"),
    ]
    print_table("", ("", ""), rows)
    signature = []
    for entry in manifest.entries.values():
        bounds = ", ".join(f"{k} <= {v}" for k, v in entry.upper_bounds.items())
        for kind, specs in (("in", entry.inputs), ("out", entry.outputs)):
            for spec in specs:
                shape = "(" + ", ".join(map(str, spec.shape)) + ")"
                signature.append((entry.name, entry.modality or "-", kind, spec.name, shape, spec.dtype, bounds))
    print_table("Entries", ("entry", "modality", "", "name", "shape", "dtype", "bounds"), signature)
    if regions:
        from crossloom.semantics import summary

        told = [
            (entry, part, modality or "-", layers, weights)
            for entry, rows in regions.items()
            for part, modality, layers, weights in summary(rows)
        ]
        print_table("Regions", ("entry", "part", "modality", "layers", "weights"), told)
    print_table("Files", ("file", "size"), [(p.path, size_text(p.size_bytes)) for p in manifest.parts])
    if seconds:
        print_table("Seconds", ("pass", "s"), [(k, f"{v:.3f}") for k, v in seconds.items()])
