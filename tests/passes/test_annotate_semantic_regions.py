"""Regions by meaning: what a function's layers, embedding, projector and head are, and which binding is whose."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from canonical import function
from crossloom.numerics import EXACT
from crossloom.passes.annotate_semantic_regions import AnnotateSemanticRegions
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_parallel_projections import FuseParallelProjections
from crossloom.passes.matching import stacks
from crossloom.rewrite import Graph
from crossloom.semantics import ATTRIBUTE, assign, region_table, regions_of, summary, with_regions
from crossloom.testing import assert_pass_preserves
from crossloom.verdict import Ledger

op = relax.op
D, HEADS = 8, 2


def tagged(mod, name, modality, **attrs):
    func = mod[name].with_attr("crossloom.modality", modality)
    for key, value in attrs.items():
        func = func.with_attr(key, value)
    return func


def attend(emit, x, q, k, v, o, source=None, mask=None):
    """Attention over x, or from x over ``source``, behind its output projection."""
    source = x if source is None else source

    def heads(y, w):
        rows = y.ty.shape[1]
        return emit(
            op.permute_dims(emit(op.reshape(emit(op.matmul(y, w)), [1, rows, HEADS, D // HEADS])), [0, 2, 1, 3])
        )

    query, keys, values = heads(x, q), heads(source, k), heads(source, v)
    scores = emit(op.multiply(emit(op.matmul(query, emit(op.permute_dims(keys, [0, 1, 3, 2])))), relax.const(0.5)))
    scores = scores if mask is None else emit(op.add(scores, mask))
    mixed = emit(op.permute_dims(emit(op.matmul(emit(op.nn.softmax(scores)), values)), [0, 2, 1, 3]))
    return emit(op.matmul(emit(op.reshape(mixed, list(x.ty.shape))), o))


def layer(emit, x, weights, source=None, mask=None):
    """A layer of 4 weights for each attention, then 2 for the MLP."""
    x = emit(op.add(x, attend(emit, x, *weights[:4], mask=mask)))
    if source is not None:
        x = emit(op.add(x, attend(emit, x, *weights[4:8], source=source)))
    return emit(op.add(x, mlp(emit, x, *weights[-2:])))


def mlp(emit, x, up, down):
    return emit(op.matmul(emit(op.nn.gelu(emit(op.matmul(x, up)))), down))


SQUARE, LAYER = (D, D), [(D, D)] * 6
DECODER = [((1, "T"), "int64"), ((1, 1, "T", "T"), "float32"), (20, D), *LAYER, *LAYER, (D,), (D, 20)]


def decoder(emit, ids, mask, table, *weights):
    x = emit(op.take(table, ids, axis=0))
    for i in range(2):
        x = layer(emit, x, weights[6 * i : 6 * i + 6], mask=mask)
    return emit(op.matmul(emit(op.nn.rms_norm(x, weights[12], [-1], 1e-6)), weights[13]))


def sized(shapes):
    t = tvm.tirx.Var("T", "int64")
    walk = lambda s: tuple(t if d == "T" else walk(d) if isinstance(d, tuple) else d for d in s)
    return [walk(s) for s in shapes]


def two_entries():
    """A vision tower with a projector, and a decoder, canonical."""
    return CanonicalizeTransformer()(two_as_imported())


def two_as_imported():

    def vision(emit, pixels, patch, *weights):
        x = emit(op.reshape(emit(op.nn.conv2d(pixels, patch, strides=2)), [1, D, 9]))
        x = emit(op.permute_dims(x, [0, 2, 1]))
        for i in range(2):
            x = layer(emit, x, weights[6 * i : 6 * i + 6])
        return mlp(emit, x, *weights[12:])

    shapes = [(1, 3, 6, 6), (D, 3, 2, 2), *LAYER, *LAYER, SQUARE, SQUARE]
    seen = tagged(function(vision, shapes, "vision"), "vision", "image")
    read = tagged(function(decoder, sized(DECODER), "decode", num_input=2), "decode", "text")
    return tvm.IRModule({"vision": seen, "decode": read})


def names(mod, entry):
    return [region.name for region in regions_of(mod[entry])]


def test_golden():
    @I.ir_module
    class Before:
        @R.function
        def embed(ids: R.Tensor((1, 3), "int64"), table: R.Tensor((9, 4), "float32")) -> R.Tensor((1, 3, 4), "float32"):
            R.func_attr({"num_input": 1, "crossloom.modality": "text"})
            with R.dataflow():
                y = R.take(table, ids, axis=0)
                R.output(y)
            return y

    row = {"name": "text.embedding", "part": "embedding", "modality": "text", "layer": -1, "attentions": 0}
    told = Before["embed"].with_attr(ATTRIBUTE, [row | {"weights": ["table"]}])
    expected = tvm.IRModule({Before.get_global_var("embed"): told})
    with Ledger() as ledger:
        tvm.ir.assert_structural_equal(AnnotateSemanticRegions()(Before), expected)
    assert [v.detail for v in ledger] == ["text.embedding"]


def test_vision_and_decode_are_told_apart():
    mod = AnnotateSemanticRegions()(two_entries())
    seen = ["image.embedding", "image.backbone.0", "image.backbone.1", "image.projector"]
    assert names(mod, "vision") == seen
    assert names(mod, "decode") == ["text.embedding", "text.decoder.0", "text.decoder.1", "text.head"]
    regions = {region.name: region for region in regions_of(mod["vision"])}
    assert regions["image.embedding"].weights == ("p1",)
    assert regions["image.backbone.1"].weights == tuple(f"p{i}" for i in range(8, 14))
    assert regions["image.projector"].weights == ("p14", "p15")
    assert [r.attentions for r in regions_of(mod["decode"])] == [0, 1, 1, 0]
    table = region_table(mod)
    assert set(table) == {"vision", "decode"}
    assert summary(table["decode"]) == [
        ("embedding", "text", 1, 1),
        ("decoder", "text", 2, 12),
        ("head", "text", 1, 2),
    ]


def test_a_tower_nobody_takes_on_ends_in_a_head():
    whole = two_entries()
    rest = {gv: f for gv, f in whole.functions_items() if gv.name_hint != "decode"}
    assert names(AnnotateSemanticRegions()(tvm.IRModule(rest)), "vision")[-1] == "image.head"


def test_cross_attention_belongs_to_the_layer_before_it():
    def whisper(emit, ids, states, table, *weights):
        x = emit(op.take(table, ids, axis=0))
        for i in range(2):
            x = layer(emit, x, weights[10 * i : 10 * i + 10], source=states)
        return x

    shapes = [((1, 3), "int64"), ((1, 5, D), "float32"), (20, D), *[SQUARE] * 20]
    mod = function(whisper, shapes, "decode", num_input=2)
    mod = tvm.IRModule({"decode": tagged(mod, "decode", "text")})
    mod = AnnotateSemanticRegions()(CanonicalizeTransformer()(mod))
    assert names(mod, "decode") == ["text.embedding", "text.decoder.0", "text.decoder.1"]
    assert [r.attentions for r in regions_of(mod["decode"])] == [0, 2, 2]


def test_two_stacks_in_one_function():
    """Vision, projector and language model inlined into one entry; positions are a table, not text."""

    def both(emit, pixels, ids, patch, positions, *weights):
        x = emit(op.permute_dims(emit(op.reshape(emit(op.nn.conv2d(pixels, patch, strides=2)), [1, D, 9])), [0, 2, 1]))
        x = emit(op.add(x, emit(op.take(positions, relax.const([[*range(9)]], "int64"), axis=0))))
        x = layer(emit, x, weights[:6])
        x = mlp(emit, x, *weights[6:8])
        x = emit(op.concat([x, emit(op.take(weights[8], ids, axis=0))], axis=1))
        x = layer(emit, x, weights[9:15], mask=relax.const(0.0))
        return emit(op.matmul(x, weights[15]))

    table = (20, D)
    shapes = [((1, 3, 6, 6), "float32"), ((1, 4), "int64"), (D, 3, 2, 2), (9, D), *LAYER, SQUARE, SQUARE, table]
    mod = function(both, [*shapes, *LAYER, (D, 20)], "prefill", num_input=2)
    mod = tvm.IRModule({"prefill": tagged(mod, "prefill", "image")})
    mod = AnnotateSemanticRegions()(CanonicalizeTransformer()(mod))
    expected = ["image.embedding", "image.backbone.0", "image.projector", "text.embedding"]
    assert names(mod, "prefill") == [*expected, "text.decoder.0", "text.head"]


def test_a_pyramid_has_a_neck():
    def detector(emit, x, *weights):
        convolve = lambda y, w: emit(op.nn.conv2d(y, w, padding=1))
        x = emit(op.add(x, convolve(emit(op.nn.relu(convolve(x, weights[0]))), weights[1])))
        wide = emit(op.concat([x, convolve(x, weights[2])], axis=1))
        return emit(op.nn.conv2d(wide, weights[3]))

    shapes = [(1, 4, 6, 6), (4, 4, 3, 3), (4, 4, 3, 3), (4, 4, 3, 3), (2, 8, 1, 1)]
    mod = function(detector, shapes, "vision")
    mod = AnnotateSemanticRegions()(tvm.IRModule({"vision": tagged(mod, "vision", "image")}))
    assert names(mod, "vision") == ["image.backbone.0", "image.neck", "image.head"]


def test_bindings_are_found_again_after_other_passes():
    mod = FuseParallelProjections()(AnnotateSemanticRegions()(two_entries()))
    graph = Graph("decode", mod["decode"], mod)
    regions, placed = regions_of(graph.func), assign(graph)
    called = {}
    for var in graph.order:
        callee = graph.callee(var)
        if callee is not None and isinstance(graph.value[var], relax.Call):
            where = regions[placed[var]].name if placed[var] >= 0 else ""
            called.setdefault(where, []).append(str(callee.attrs["Composite"]).removeprefix("crossloom."))
    one = ["fused_linear", "attention", "linear", "mlp"]
    assert called["text.decoder.0"] == called["text.decoder.1"] == one
    assert called["text.head"] == ["rms_norm", "linear"]


def test_what_several_layers_share_belongs_to_none():
    """Keys of all layers in one product, as a later pass makes them."""

    def build(shared):
        def states_and_layers(emit, ids, states, table, *weights):
            x = emit(op.take(table, ids, axis=0))
            for i in range(2):
                x = layer(emit, x, weights[6 * i : 6 * i + 6])
            if not shared:
                return x
            wide = emit(op.matmul(states, emit(op.concat([weights[1], weights[7]], axis=1))))
            return emit(op.concat([x, emit(op.strided_slice(wide, [2], [0], [D]))], axis=1))

        shapes = [((1, 3), "int64"), ((1, 5, D), "float32"), (20, D), *LAYER, *LAYER]
        return CanonicalizeTransformer()(function(states_and_layers, shapes, "decode", num_input=2))

    regions = regions_of(AnnotateSemanticRegions()(build(False))["decode"])
    mod = build(True)
    graph = Graph("decode", with_regions(mod["decode"], regions), mod)
    placed = assign(graph)
    (wide,) = [v for v in graph.order if list(v.ty.shape) == [1, 5, 2 * D]]
    assert placed[wide] == -1


def test_nothing_recognized_is_refused():
    mod = function(lambda emit, x: emit(op.abs(x)), [(2, 3)], "decode")
    with Ledger() as ledger:
        assert AnnotateSemanticRegions()(mod).same_as(mod)
    assert [v.code for v in ledger] == ["nothing-recognized"]


def test_a_branch_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(stacks, "LONGEST_BRANCH", 4)
    with Ledger() as ledger:
        mod = AnnotateSemanticRegions()(two_entries())
    assert "branch-too-long" in {v.code for v in ledger.refused}
    assert all(region.layer <= 1 for region in regions_of(mod["vision"]))


def test_it_preserves_transformer_modules():
    assert_pass_preserves(AnnotateSemanticRegions(), numerics=EXACT, max_examples=10)


@pytest.mark.parametrize("modality, part", [("image", "image.projector"), ("text", "text.head")])
def test_an_entry_of_linear_layers_alone(modality, part):
    mod = function(mlp, [(1, 3, D), SQUARE, SQUARE], "vision")
    rest = two_as_imported()["decode"]
    mod = tvm.IRModule({"vision": tagged(mod, "vision", modality), "decode": rest})
    assert names(AnnotateSemanticRegions()(CanonicalizeTransformer()(mod)), "vision") == [part]


def test_twice_is_once():
    once = AnnotateSemanticRegions()(two_entries())
    tvm.ir.assert_structural_equal(AnnotateSemanticRegions()(once), once)


@pytest.mark.parametrize("entry", ["vision", "decode"])
def test_every_layer_weight_is_in_one_region(entry):
    mod = AnnotateSemanticRegions()(two_entries())
    owned = [weight for region in regions_of(mod[entry]) for weight in region.weights]
    count = int(mod[entry].attrs["num_input"])
    assert sorted(owned) == sorted(p.name for p in list(mod[entry].params)[count:])
