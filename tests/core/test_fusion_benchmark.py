"""What ``python -m benchmarks.fusion`` counts: kernels, bytes between them, layers, and what falls short."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.script import tirx as T

from canonical import function
from checkout import benchmark
from crossloom.importers.signature import entry_of
from crossloom.model import Model
from crossloom.targets import get_target
from crossloom.testing import run_module

fusion, fusion_speed = benchmark("fusion"), benchmark("fusion_speed")
shares_read = benchmark("fusion_reads").shares_read
count, unfused = benchmark("fusion_count").count, benchmark("fusion_count").unfused
read_model, write_model = benchmark("fusion_files").read_model, benchmark("fusion_files").write_model
Source, Unavailable = benchmark("fusion_models").Source, benchmark("fusion_models").Unavailable

op = relax.op
D, FFN, ROWS = 32, 64, 5


def model(bound=None):
    """Return ``x + relu(x w) v`` over (1, ROWS, D), or over a symbolic length of at most ``bound``."""
    rows = tirx.Var("T", "int64") if bound else ROWS

    def lines(emit, x, w, v):
        hidden = emit(op.nn.relu(emit(op.matmul(x, w))))
        return emit(op.add(x, emit(op.matmul(hidden, v))))

    mod = function(lines, [(1, rows, D), (D, FFN), (FFN, D)], "decode")
    entry = entry_of(
        mod["decode"], "decode", ["x"], ["y"], weights=["w", "v"], upper_bounds={"T": bound} if bound else {}
    )
    rng = np.random.default_rng(0)
    params = {
        "w": rng.standard_normal((D, FFN)).astype("float32"),
        "v": rng.standard_normal((FFN, D)).astype("float32"),
    }
    return Model(mod, params, {"decode": entry}, name="tiny")


@pytest.mark.parametrize("bound, rows", [(None, ROWS), (7, 7), (1000, 64)])
def test_kernels_and_bytes(bound, rows):
    host = get_target("host")
    before, after = count(model(bound), host, unfused()), count(model(bound), host)
    one, two = before.entries["decode"], after.entries["decode"]
    # Apart, the second product lies between the kernels too, and the sum reads it again.
    assert (len(one.kernels), one.between_bytes) == (3, 4 * rows * (FFN + D))
    assert one.traffic_bytes == 4 * rows * (2 * FFN + 5 * D)
    # Together, x is read once, the result written once, and the hidden values are the kernel's own: one chunk of them.
    assert (len(two.kernels), two.between_bytes) == (1, 4 * rows * FFN)
    assert two.traffic_bytes == 4 * rows * (2 * FFN + 2 * D)
    assert one.outside_bytes == two.outside_bytes == 4 * rows * 2 * D
    assert two.kernels[0].name.startswith("fused_feed_forward_kernel")
    fired = {v.pass_name for v, _ in after.verdicts if v.fired}
    assert fired >= {"fuse-feed-forward", "lower-fused-feed-forward", "canonicalize-transformer"}
    assert [region.name for region in after.entries["decode"].regions] == ["encoder.0"]


def test_unfused_leaves_no_fusing_pass():
    assert {"fuse-attention", "lower-fused-linear", "fold-norm-into-linear"} <= set(unfused())
    assert not any(name.startswith(("canonicalize", "relax", "schedule")) for name in unfused())


def test_a_model_survives_its_files(tmp_path):
    write_model(tmp_path / "tiny", model(9))
    loaded = read_model(tmp_path / "tiny")
    assert loaded.entries == model(9).entries
    x = np.random.default_rng(1).standard_normal((1, 3, D)).astype("float32")
    w, v = loaded.params["w"], loaded.params["v"]
    (got,) = run_module(loaded.mod, "decode", [x, *loaded.entry_params("decode")])
    np.testing.assert_allclose(got, x + np.maximum(x @ w, 0) @ v, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_had_says_why(tmp_path):
    with pytest.raises(Unavailable, match=r"no .*python"):
        Source(tmp_path, tmp_path / "python").load("llama")
    row = fusion.measure("llama", Source(tmp_path, tmp_path / "python"))
    assert fusion.shortfalls([row], {}) == [f"llama: {row.missing}"]


def test_what_falls_short_is_named():
    layers = [fusion.LayerRow("text.decoder.0", 20, 6, 6), fusion.LayerRow("text.decoder.1", 20, 7, 6, ["a"], ["b"])]
    entry = fusion.EntryRow("m", "decode", layers, (40, 13), (100, 10), (200, 120), (30, 30))
    assert entry.left == pytest.approx(0.6) and entry.left_inside == pytest.approx(90 / 170)
    seconds = {"fuse-x": {1000: 0.1, 10000: 11.0}}
    short = fusion.shortfalls([fusion.ModelRow("m", [entry])], seconds)
    assert [line.split(":")[0] for line in short] == [
        "m",
        "m, decode, text.decoder.1",
        "fusion's passes",
        "fuse-x",
    ]
    times = [fusion_speed.Timing("m", "decode", 100, 50, 1e-6), fusion_speed.Timing("m", "prefill", 100, 110, 0.5)]
    assert [line.split(":")[0] for line in fusion_speed.shortfalls(times)] == ["m, prefill", "m, prefill"]
    assert fusion_speed.geometric_mean(times) == pytest.approx((2 * 100 / 110) ** 0.5)


def test_inputs_fit_their_entry():
    (x,) = fusion_speed.inputs_of(model(9).entries["decode"])
    assert x.shape == (1, 9, D) and x.dtype == "float32"


@T.prim_func(private=True, s_tir=True)
def one_of_four(
    x: T.Buffer((4, 3, 8), "float32"), layer: T.Buffer((), "int64"), w: T.Buffer((3, 8), "float32"), y: T.handle
):
    """Read one slice of x, which is known when it runs, and half of w, by another name of it."""
    n = T.int64()
    out = T.match_buffer(y, (3, n), "float32")
    flat = T.decl_buffer((24,), "float32", data=w.data)
    at = T.bind(layer[()])
    for i, j in T.grid(3, n):
        out[i, j] = x[at, i, j] + flat[i * 4 + j]


def test_a_kernel_reads_what_it_reads_of_its_arguments():
    (n,) = [d for d in one_of_four.params[3].ty.shape if isinstance(d, tirx.Var)]
    # n = 4: half of each row of a quarter of x, the first 12 of 24 values of w.
    assert shares_read(one_of_four, {n: 4}) == [1 / 8, 1.0, 1 / 2, 0.0]


def test_a_slice_reads_what_it_gives():
    def lines(emit, x):
        low = emit(op.strided_slice(x, [1], [2], [4]))
        return emit(op.permute_dims(low, [1, 0]))

    mod = function(lines, [(6, 8)], "main")
    entry = entry_of(mod["main"], "main", ["x"], ["y"])
    counted = count(Model(mod, {}, {"main": entry}, name="slice"), get_target("host")).entries["main"]
    assert sum(kernel.read_bytes for kernel in counted.kernels) == len(counted.kernels) * 4 * 6 * 2
    assert (counted.outside_bytes, len(counted.kernels)) == (4 * (6 * 8 + 6 * 2), 1)
