"""Times of calls taken in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax


def take_turns(
    runs: Mapping[str, Callable[[], Any]], turns: int, turn_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the fastest wall and processor time of one call (microseconds), each turn running all of them."""
    calls: dict[str, int] = {}
    for name, run in runs.items():
        run()
        once = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            once.append(time.perf_counter() - start)
        calls[name] = max(1, int(turn_s / max(min(once), 1e-6)))
    wall = dict.fromkeys(runs, float("inf"))
    cpu = dict.fromkeys(runs, float("inf"))
    for _ in range(turns):
        for name, run in runs.items():
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(calls[name]):
                run()
            wall[name] = min(wall[name], 1e6 * (time.perf_counter() - start) / calls[name])
            cpu[name] = min(cpu[name], 1e6 * (time.process_time() - busy) / calls[name])
    return wall, cpu


def call_of(executable: Any, entry: str, arrays: Sequence[np.ndarray]) -> Callable[[], Any]:
    """Return a call of an entry of an executable on arrays."""
    function = relax.VirtualMachine(executable, tvm.cpu())[entry]
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays]
    return lambda: function(*tensors)
