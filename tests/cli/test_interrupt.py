"""Ctrl-C ends `tvmc` with one line, whatever destructors it meets on its way."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
from crossloom.cli import main

# Whoever runs the tests in the background has it ignored, and this process with them.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Broken:
    def __del__(self):
        raise OSError("half made")

class Struck:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # the handler runs here, where nothing can be raised

def command(*_, **__):
    kept = Broken()
    if WHERE == "body":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)
    elif WHERE == "destructor":
        Struck()
        time.sleep(20)
    print("done")

main._COMMANDS = (("doctor", lambda: command()), ("lint", lambda: None))
sys.argv[1:] = ["doctor"]
late = Broken() if WHERE != "nowhere" else None
main.main()
"""


@pytest.mark.parametrize("where", ["body", "destructor", "nowhere"])
def test_an_interrupt_says_one_line(where) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"WHERE = {where!r}\n{SCRIPT}"], capture_output=True, text=True, timeout=60
    )
    if where == "nowhere":  # a failing destructor is told as ever
        assert done.returncode == 0 and done.stdout == "done\n" and "half made" in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
