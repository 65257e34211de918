"""What is read of a region goes with the function that it was read for, also where there is no kernel for it."""

from __future__ import annotations

import gc
import weakref

import pytest
from tvm import relax

from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.passes.regions.columns import NoKernel
from crossloom.passes.regions.feed_forward import layer_of
from crossloom.passes.regions.reader import Reader
from crossloom.rewrite import Graph, driver
from crossloom.targets import get_target


def unreadable():
    """Return a module whose region holds no linear layer."""
    builder = relax.BlockBuilder()
    x, a = (relax.Var(name, relax.TensorType((2, 8), "float32")) for name in "xa")
    attrs = {"Composite": "crossloom.fused_linear"}
    with builder.function("region", [a], attrs=attrs, private=True):
        with builder.dataflow():
            out = builder.emit_output(relax.op.sin(a))
        builder.emit_func_output(out)
    region = builder.get().get_global_var("region")
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.Call(region, [x]))
        builder.emit_func_output(out)
    return builder.get()


def by_reader(graph):
    Reader(graph).step(graph.order[0])


def by_layer(graph):
    layer_of(graph, graph.order[0])


@pytest.mark.parametrize("read", [by_reader, by_layer])
def test_a_refusal_does_not_keep_the_graph(read):
    mod = unreadable()
    graph = Graph("main", mod["main"], mod)
    with pytest.raises(NoKernel, match="sin"):
        read(graph)
    kept = weakref.ref(graph)
    del graph
    gc.collect()
    assert kept() is None


def test_a_pass_does_not_keep_the_graphs_of_modules_before(monkeypatch):
    graphs = weakref.WeakSet()

    def remembered(*args):
        graph = Graph(*args)
        graphs.add(graph)
        return graph

    monkeypatch.setattr(driver, "Graph", remembered)
    lower, mod = LowerFusedLinear(get_target("host").tvm_target()), unreadable()
    assert lower(mod).same_as(mod)
    gc.collect()
    assert not graphs
