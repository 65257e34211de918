"""The Pareto table of the vision tower's variants: what it leaves out, what is on the front, what falls short."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from checkout import benchmark
from crossloom.flow import steps


@pytest.fixture(scope="module")
def pareto():
    return benchmark("rotary_pareto")


@pytest.fixture
def points(pareto):
    return [
        pareto.Point("ViT", 100.0, 100.0, 60, 40, 39, 1e-6),
        pareto.Point("ViT + rotary", 90.0, 90.0, 50, 40, 39, 1e-6),
        pareto.Point("ViT + rotary + MLP", 80.0, 80.0, 40, 40, 39, 1e-6),
    ]


def test_variants_leave_out_fewer_and_fewer_fusions(pareto):
    out = [set(pareto.disabled(name, "host")) for name in pareto.VARIANTS]
    fusing = {step.text.name for step in steps("host") if step.info.stage == "fuse"}
    assert out[0] == fusing and out[2] == set()
    assert {"fuse-rotary-projection", "fuse-parallel-projections"} == fusing - out[1] - {"fuse-attention"}


def test_front(pareto, points):
    assert pareto.front(points) == points[2:]
    slower_but_better = replace(points[0], right=40)
    assert pareto.front([slower_but_better, *points[1:]]) == [slower_but_better, points[2]]
    # Equal points are both on it.
    assert pareto.front([points[2], replace(points[2], name="again")]) == [points[2], replace(points[2], name="again")]


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (1, {"right": 38}, "38 of 40 right, the reference has 39"),
        (0, {"error": 2e-3}, "error 0.002"),
        (2, {"error": float("nan")}, "error nan"),
        (2, {"wall_us": 120.0, "cpu_us": 110.0}, "1.10 times the time of ViT"),
    ],
)
def test_check_names_each_shortfall(pareto, points, at, change, message):
    assert pareto.shortfalls(points, 39) == []
    points[at] = replace(points[at], **change)
    (found,) = pareto.shortfalls(points, 39)
    assert message in found


def test_a_busy_machine_is_no_shortfall(pareto, points):
    points[2] = replace(points[2], wall_us=150.0)
    assert pareto.shortfalls(points, 39) == []


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plot(pareto, points, tmp_path, suffix):
    path = tmp_path / f"front{suffix}"
    pareto.plot(points, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in data


def test_other_pictures_are_refused(pareto, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rotary_pareto", "--plot", "front.txt"])
    with pytest.raises(SystemExit) as told:
        pareto.main()
    assert told.value.code == 2 and "front.txt" in capsys.readouterr().err


def test_the_tower_is_measured(pareto):
    """One question, one turn: the figures are there, and the fused tower calls fewer kernels for the same answer."""
    first, middle, last = pareto.measure(1, 1, 0.001)
    assert first.kernels > middle.kernels > last.kernels
    assert first.right == middle.right == last.right
    assert max(p.error for p in (first, middle, last)) < pareto.MOST_ERROR and min(p.wall_us for p in (first, last)) > 0
