"""The plugin package beside this file: installed, it adds a target, passes and a subcommand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).with_name("plugin_package")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    # A copy: building writes into the source tree.
    source = shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--target", str(folder / "site"), str(source)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def run(installed, program, tmp_path):
    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        env = dict(os.environ, PYTHONPATH=str(installed))
        return subprocess.run(
            [*program, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path
        )

    return call


def test_subcommand_and_broken_neighbours(run):
    done = run("greet", "Ada")
    assert done.returncode == 0 and done.stdout == "hello Ada\n"
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: plugin")]
    assert len(warnings) == 2 and "Traceback" not in done.stderr
    assert any("'broken'" in line for line in warnings)
    assert any("'greedy'" in line and "'doctor'" in line for line in warnings)


def test_target_and_pass_are_known(run):
    done = run("targets", "toaster", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["cpu"]["mcpu"] == "cortex-a55"
    done = run("passes", "swap-add", "--json")
    assert json.loads(done.stdout)[0]["numerics"]["kind"] == "exact"


def test_a_broken_pass_or_target_plugin_is_left_out_with_a_warning(run):
    done = run("targets", "toaster")
    assert done.returncode == 0 and "warning: plugin 'absent'" in done.stderr and "no_such_target" in done.stderr
    done = run("targets", "no-such-toaster")
    assert done.returncode == 3 and "plugins left out: absent" in done.stderr.splitlines()[-1]
    done = run("passes", "swap-add")
    assert done.returncode == 0 and "no_such_module" in done.stderr and "Traceback" not in done.stderr
    done = run("passes", "no-such-pass")
    assert done.returncode == 2 and "plugins left out: absent" in done.stderr.splitlines()[-1]


def test_verify_names_the_pass_and_the_rewrite_that_break(run, model, tmp_path):
    done = run(
        "verify", model, "--pipeline", "swap-add,break-add,legalize-ops", "--size", "n=2", "--bisect",
        "--repro", tmp_path / "case", "--json",
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    report = json.loads(done.stdout)
    assert [bool(p["violations"]) for p in report["passes"]] == [False, True, False]
    assert report["instance"]["rewrite"] == "break-add"
    assert "break-add breaks its contract" in done.stderr
    assert sorted(p.name for p in (tmp_path / "case").iterdir()) == [
        "arrays.npz",
        "case.json",
        "module.json",
        "module.txt",
        "repro.py",
    ]


def test_the_repro_shows_it(run, installed, model, tmp_path):
    case = tmp_path / "case"
    assert run("verify", model, "--pipeline", "break-add", "--repro", case).returncode == 4
    env = dict(os.environ, PYTHONPATH=str(installed))
    done = subprocess.run(
        [sys.executable, str(case / "repro.py")], capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr
    error = float(done.stdout.split("error ")[1].split(" ")[0])
    assert 0.4 < error < 2.5 and "after break-add" in done.stdout
