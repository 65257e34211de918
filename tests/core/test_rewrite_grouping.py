"""The grouping driver: which bindings may become one region, where it stands, what it holds, and how long it takes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from canonical import data, function
from crossloom.rewrite import GroupRule, Match, composite_attrs, composite_name, group_pass, limit_rewrites
from crossloom.testing import run_module
from crossloom.verdict import Ledger, accept, refuse

op = relax.op
ROOTS = frozenset({"relax.nn.relu", "relax.exp", "relax.add", "relax.reshape", "crossloom.fused_test"})


def rule(*positions, name="test", entry=None, roots=ROOTS, **kwargs):
    """A group of the bindings at these positions of a function, found at the first of them that is a root."""

    def match(graph, root):
        if entry not in (None, graph.name) or len(graph.order) <= max(positions):
            return None
        members = [graph.order[i] for i in positions]
        return Match(graph, root, {}, frozenset(members)) if root.same_as(members[0]) else None

    return GroupRule(name, roots, match, "crossloom.fused_test", **kwargs)


def grouped(mod, *rules):
    """What the rules make of a module, well-formed, the input untouched, and the verdicts' codes."""
    before = tvm.ir.save_json(mod)
    with Ledger() as ledger:
        out = group_pass("test", list(rules))(mod)
    assert relax.analysis.check_well_formed(out)
    tvm.ir.assert_structural_equal(mod, tvm.ir.load_json(before))
    return out, [v.code for v in ledger]


def refused(mod, *rules):
    out, codes = grouped(mod, *rules)
    assert out.same_as(mod), "a refusal changes nothing"
    return codes


def lines(func):
    """What each binding of a function or branch is: an operator, a callee, a field's number; aliases are left out."""
    out = []
    for block in (func.body if isinstance(func, relax.Function) else func).blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Call):
                out.append(value.op.name if isinstance(value.op, tvm.ir.Op) else value.op.name_hint)
            elif not isinstance(value, relax.Var):
                out.append(value.index if isinstance(value, relax.TupleGetItem) else type(value).__name__)
    return out


def same_results(before, after, *arrays, entry="decode"):
    for a, b in zip(run_module(before, entry, arrays), run_module(after, entry, arrays), strict=True):
        np.testing.assert_array_equal(a, b)


def regions(mod):
    return {g.name_hint: f for g, f in mod.functions_items() if composite_name(f).startswith("crossloom.fused_")}


# What is formed ----------------------------------------------------------------------------------------------------


def in_between(e, x, y):
    first = e(op.nn.relu(x))
    between = e(op.exp(first))
    second = e(op.nn.relu(y))
    return relax.Tuple([e(op.add(between, second)), first])


def test_members_apart_and_read_in_between_become_one_region():
    mod = function(in_between, [(3, 4), (3, 4)])
    out, codes = grouped(mod, rule(0, 2))
    assert codes == ["fired"]
    assert lines(out["decode"]) == ["fused_test", 0, 1, "relax.exp", "relax.add", "Tuple"]
    region = out["fused_test"]
    assert composite_name(region) == "crossloom.fused_test" and len(region.params) == 2
    assert lines(region) == ["relax.nn.relu", "relax.nn.relu", "Tuple"]
    same_results(mod, out, *data((3, 4), (3, 4)))


def test_one_result_is_no_tuple_and_what_nobody_else_reads_stays_inside():
    mod = function(lambda e, x: e(op.add(e(op.exp(e(op.nn.relu(x)))), x)), [(2, 3)])
    out, _ = grouped(mod, rule(0, 1, 2))
    assert lines(out["decode"])[0] == "fused_test" and 0 not in lines(out["decode"])
    assert lines(out["fused_test"]) == ["relax.nn.relu", "relax.exp", "relax.add"]
    same_results(mod, out, *data((2, 3)))


@pytest.mark.parametrize(
    "line, alike",
    [
        (lambda e, x, i: op.add(x, x), True),
        (lambda e, x, i: op.add(e(op.multiply(x, x)), x), True),
        (lambda e, x, i: op.add(x, relax.const(float(i))), False),
        (lambda e, x, i: op.permute_dims(x, [1, 0]) if i else op.permute_dims(x, [0, 1]), False),
        (lambda e, x, i: op.reshape(x, (4, 4) if i else (2, 8)), False),
        (lambda e, x, i: op.strided_slice(x, [0], [i], [i + 2]), False),
        (lambda e, x, i: e(op.add(x, x)) if i else e(op.multiply(x, x)), False),
        (lambda e, x, i: op.concat([x, x] if i else [x, e(op.exp(x))], 0), False),
    ],
)
def test_groups_that_say_the_same_share_a_region_and_others_do_not(line, alike):
    """Each group is a line of its own behind a relu, at two places of a function."""

    def build(e, x):
        ends = []
        for i in range(2):
            first = e(op.nn.relu(x))
            ends.append(e(line(e, first, i)))
        return relax.Tuple(ends)

    mod = function(build, [(4, 4)])

    def match(graph, root):
        members, at = [root], graph.position[root] + 1
        while at < len(graph.order) and graph.op(graph.order[at]) not in ("relax.nn.relu", ""):
            members.append(graph.order[at])
            at += 1
        return Match(graph, root, {}, frozenset(members))

    out, codes = grouped(mod, GroupRule("test", frozenset({"relax.nn.relu"}), match, "crossloom.fused_test"))
    assert codes == ["fired", "fired"]
    assert len(regions(out)) == (1 if alike else 2)
    same_results(mod, out, *data((4, 4)))


def test_results_come_in_program_order_however_the_group_is_listed():
    def build(e, x):
        values = [e(op.nn.relu(x)), e(op.exp(x)), e(op.add(x, x))]
        return relax.Tuple(values[::-1])

    mod = function(build, [(2, 2)])
    first = rule(0, 1, 2)
    out, _ = grouped(mod, first)
    again, _ = grouped(mod, rule(0, 2, 1))
    tvm.ir.assert_structural_equal(out, again)
    assert lines(out["fused_test"]) == ["relax.nn.relu", "relax.exp", "relax.add", "Tuple"]
    same_results(mod, out, *data((2, 2)))


def test_an_operand_defined_behind_the_first_member_comes_before_the_region():
    def build(e, x, y):
        first = e(op.nn.relu(x))
        late = e(op.exp(y))
        other = e(op.negative(x))
        second = e(op.add(late, x))
        return relax.Tuple([first, other, second])

    mod = function(build, [(3,), (3,)])
    out, _ = grouped(mod, rule(0, 3))
    # What need not move keeps its place behind the region's first member.
    assert lines(out["decode"])[:2] == ["relax.exp", "fused_test"]
    assert lines(out["decode"]).index("relax.negative") > 1
    same_results(mod, out, *data((3,), (3,)))


def test_two_groups_of_one_block_and_bindings_between_them():
    def build(e, x):
        a = e(op.nn.relu(x))
        b = e(op.exp(a))
        c = e(op.nn.relu(a))
        d = e(op.add(b, c))
        return relax.Tuple([d, e(op.exp(d)), e(op.negative(c))])

    mod = function(build, [(2, 5)])
    out, codes = grouped(mod, rule(0, 2, name="one"), rule(1, 3, name="two"))
    assert codes == ["fired", "fired"] and len(regions(out)) == 2
    assert [name for name in lines(out["decode"]) if isinstance(name, str)][:2] == ["fused_test", "fused_test1"]
    same_results(mod, out, *data((2, 5)))


def test_facts_are_stored_and_every_function_is_seen():
    first = function(in_between, [(3, 4), (3, 4)], "prefill")
    bb = relax.BlockBuilder(first)
    mod = function(in_between, [(3, 4), (3, 4)], "decode", builder=bb)
    out, codes = grouped(mod, rule(0, 2, attrs=lambda m: {"axes": [1, 2], "kind": "x"}))
    assert codes == ["fired", "fired"] and len(regions(out)) == 1, "equal regions are one function"
    (region,) = regions(out).values()
    facts = composite_attrs(region)
    assert [int(a) for a in facts["axes"]] == [1, 2] and facts["kind"] == "x"
    for entry in ("prefill", "decode"):
        same_results(mod, out, *data((3, 4), (3, 4)), entry=entry)


def test_symbolic_sizes_are_the_regions_own():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")

    def build(e, x, y):
        flat = e(op.reshape(x, [n * m]))
        other = e(op.reshape(y, [m, n]))
        return relax.Tuple([flat, e(op.exp(other)), e(op.nn.relu(flat))])

    mod = function(build, [(n, m), (m * n,)], "prefill")
    out, codes = grouped(mod, rule(0, 1, 3))
    assert codes == ["fired"]
    (region,) = regions(out).values()
    inner, outer = (set(relax.analysis.defined_symbolic_vars(f)) for f in (region, out["prefill"]))
    assert inner and not inner & outer
    for shape in ((2, 3), (1, 1), (0, 4)):
        same_results(mod, out, *data(shape, (shape[0] * shape[1],)), entry="prefill")


def test_regions_are_opened_when_they_join_a_larger_group():
    mod = function(in_between, [(3, 4), (3, 4)])
    once, _ = grouped(mod, rule(0, 2))
    # call, its two fields, the exponential, the sum
    twice, codes = grouped(once, rule(0, 1, 2, 3, 4, name="larger"))
    assert codes == ["fired"]
    used = [name for name in lines(twice["decode"]) if isinstance(name, str) and name.startswith("fused_test")]
    assert len(used) == 1
    region = twice[used[0]]
    assert lines(region) == ["relax.nn.relu", "relax.nn.relu", "relax.exp", "relax.add", "Tuple"]
    same_results(mod, twice, *data((3, 4), (3, 4)))


def test_a_region_of_one_result_is_opened_too():
    mod = function(lambda e, x: e(op.negative(e(op.add(e(op.exp(e(op.nn.relu(x)))), x)))), [(2, 3)])
    once, _ = grouped(mod, rule(0, 1))
    twice, _ = grouped(once, rule(0, 1, name="larger"))
    used = [name for name in lines(twice["decode"]) if isinstance(name, str) and name.startswith("fused_test")]
    assert len(used) == 1 and lines(twice[used[0]]) == ["relax.nn.relu", "relax.exp", "relax.add"]
    same_results(mod, twice, *data((2, 3)))


def test_constants_stay_in_the_region():
    mod = function(lambda e, x: relax.Tuple([e(op.add(x, relax.const([1.0, 2.0]))), e(op.exp(x))]), [(3, 2)])
    out, _ = grouped(mod, rule(0, 1))
    assert len(out["fused_test"].params) == 1
    same_results(mod, out, *data((3, 2)))


# What is refused ---------------------------------------------------------------------------------------------------


def test_what_depends_on_a_member_and_feeds_another_is_not_convex():
    mod = function(lambda e, x: e(op.add(e(op.negative(e(op.nn.relu(x)))), x)), [(2,)])
    assert refused(mod, rule(0, 2)) == ["not-convex"]
    out, codes = grouped(mod, rule(0, 1, 2))
    assert codes == ["fired"]
    same_results(mod, out, *data((2,)))


def test_not_convex_over_a_long_way():
    def build(e, x, y):
        value = e(op.nn.relu(x))
        for _ in range(20):
            value = e(op.negative(value))
            e(op.exp(y))
        return e(op.add(value, y))

    mod = function(build, [(2,), (2,)])
    assert refused(mod, rule(0, 41)) == ["not-convex"]


def test_groups_that_would_wait_for_each_other_are_not_both_formed():
    def build(e, x, y):
        a = e(op.nn.relu(x))
        d = e(op.exp(y))
        b = e(op.exp(a))
        c = e(op.nn.relu(d))
        return relax.Tuple([a, b, c, d])

    mod = function(build, [(2,), (2,)])
    out, codes = grouped(mod, rule(0, 3, name="one"), rule(1, 2, name="two"))
    assert codes == ["fired", "not-convex"]
    same_results(mod, out, *data((2,), (2,)))


def test_a_way_back_through_groups_that_reach_far_behind_is_seen():
    """m1 -> first group, whose other member stands behind m2 -> a plain binding -> second group -> m2."""

    def build(e, x, y):
        m1 = e(op.nn.relu(x))
        first = e(op.exp(m1))
        second = e(op.nn.relu(y))
        m2 = e(op.add(second, second))
        first_too = e(op.exp(y))
        second_too = e(op.nn.relu(e(op.negative(first_too))))
        return relax.Tuple([m1, first, second, m2, first_too, second_too])

    mod = function(build, [(2,), (2,)])
    rules = [rule(1, 4, name="first"), rule(2, 6, name="second"), rule(0, 3, name="third")]
    out, codes = grouped(mod, *rules)
    assert codes == ["fired", "fired", "not-convex"]
    same_results(mod, out, *data((2,), (2,)))


def test_members_of_an_earlier_rule_are_claimed():
    def build(e, x):
        return relax.Tuple([e(op.nn.relu(x)), e(op.exp(x)), e(op.add(x, x))])

    mod = function(build, [(2,)])
    out, codes = grouped(mod, rule(1, 2, name="one"), rule(0, 2, name="two"))
    assert codes == ["fired", "claimed-by-earlier-rewrite"] and len(regions(out)) == 1


def test_what_nobody_reads_is_no_group():
    def build(e, x):
        e(op.nn.relu(x))
        e(op.exp(x))
        return e(op.negative(x))

    assert refused(function(build, [(2,)]), rule(0, 1)) == ["read-by-nobody"]


def cast_module(inside):
    """relu; match_cast of x to (n,); exp of the cast value or of x."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(None, "float32", ndim=1))
    y = relax.Var("y", relax.TensorType((4,), "float32"))
    with bb.function("decode", [x, y]):
        with bb.dataflow():
            first = bb.emit(op.nn.relu(y))
            cast = bb.match_cast(x, relax.TensorType((tirx.Var("n", "int64"),), "float32"))
            second = bb.emit(op.exp(cast if inside else y))
            out = bb.emit_output(relax.Tuple([first, second, cast]))
        bb.emit_func_output(out)
    return bb.get()


def test_a_match_cast_is_no_member_and_is_not_spanned():
    assert refused(cast_module(True), rule(0, 1)) == ["crosses-a-match-cast"]
    assert refused(cast_module(False), rule(0, 2)) == ["spans-a-match-cast"]


def test_nothing_moves_over_a_match_cast():
    """The size it defines is mentioned behind it; a group behind it does not pull its operands in front."""
    bb = relax.BlockBuilder()
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType(None, "float32", ndim=1))
    y = relax.Var("y", relax.TensorType((2,), "float32"))
    with bb.function("decode", [x, y]):
        with bb.dataflow():
            early = bb.emit(op.nn.relu(y))
            cast = bb.match_cast(x, relax.TensorType((n,), "float32"))
            a = bb.emit(op.nn.relu(cast))
            late = bb.emit(op.full([n], relax.const(2.0), "float32"))
            b = bb.emit(op.add(cast, late))
            out = bb.emit_output(relax.Tuple([early, a, b]))
        bb.emit_func_output(out)
    mod = bb.get()
    out, codes = grouped(mod, rule(2, 4))
    assert codes == ["fired"]
    kinds = [type(b).__name__ for b in out["decode"].body.blocks[0].bindings]
    assert kinds.index("MatchCast") == 1
    same_results(mod, out, *data((3,), (2,)))


def test_bindings_outside_a_dataflow_block_stay():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    with bb.function("decode", [x]):
        first, second = bb.emit(op.nn.relu(x)), bb.emit(op.exp(x))
        bb.emit_func_output(relax.Tuple([first, second]))
    assert refused(bb.get(), rule(0, 1)) == ["outside-a-dataflow-block"]


def test_two_blocks_are_not_one_place():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    with bb.function("decode", [x]):
        with bb.dataflow():
            first = bb.emit_output(op.nn.relu(x))
        between = bb.emit(op.negative(x))  # TVM would make one of two blocks side by side
        with bb.dataflow():
            second = bb.emit_output(op.exp(x))
        bb.emit_func_output(relax.Tuple([first, between, second]))
    mod = bb.get()
    assert len(mod["decode"].body.blocks) == 3
    assert refused(mod, rule(0, 2)) == ["crosses-a-branch"]


def branches(build_true, build_false, shape=(2, 3)):
    """``if c: true(x, y) else: false(x, y)`` with a dataflow block in each branch, and one in front."""
    ty = relax.TensorType(shape, "float32")
    x, cond = relax.Var("x", ty), relax.Var("c", relax.TensorType((), "bool"))
    front = relax.Var("front", ty)

    def branch(build, name):
        bindings = []

        def emit(value):
            bindings.append(relax.VarBinding(relax.DataflowVar(f"{name}{len(bindings)}", ty), value))
            return bindings[-1].var

        last = emit(build(emit, x, front))
        bindings[-1] = relax.VarBinding(relax.Var(last.name, ty), bindings[-1].value)
        return relax.SeqExpr([relax.DataflowBlock(bindings)], bindings[-1].var)

    out = relax.Var("out", ty)
    body = relax.SeqExpr(
        [
            relax.DataflowBlock([relax.VarBinding(front, op.nn.relu(x))]),
            relax.BindingBlock(
                [relax.VarBinding(out, relax.If(cond, branch(build_true, "t"), branch(build_false, "f")))]
            ),
        ],
        out,
    )
    func = relax.Function([x, cond], body, ty).with_attr("global_symbol", "decode")
    return relax.transform.Normalize()(tvm.ir.IRModule({"decode": func}))


def sides():
    def yes(e, x, front):
        return op.add(e(op.nn.relu(front)), e(op.exp(x)))

    def no(e, x, front):
        return op.add(e(op.exp(front)), e(op.nn.relu(x)))

    return branches(yes, no)


def test_groups_form_inside_branches():
    mod = sides()
    # front, out, relu exp add, exp relu add
    out, codes = grouped(mod, rule(2, 3, name="yes"), rule(5, 6, 7, name="no"))
    assert codes == ["fired", "fired"] and len(regions(out)) == 2
    choice = out["decode"].body.blocks[1].bindings[0].value
    assert lines(choice.true_branch) == ["fused_test", 0, 1, "relax.add"]
    assert lines(choice.false_branch) == ["fused_test1"]
    # As numpy: TVM's memory planner crashes on values of its own in both branches, which regions are not (tvm #20191).
    (x,) = data((2, 3))
    front = np.maximum(x, 0)
    for cond, want in ((True, front + np.exp(x)), (False, np.exp(front) + front)):
        np.testing.assert_allclose(run_module(out, "decode", [x, np.array(cond)])[0], want, rtol=1e-6)


def test_a_group_does_not_cross_a_branch():
    assert refused(sides(), rule(0, 2)) == ["crosses-a-branch"]
    assert refused(sides(), rule(2, 5)) == ["crosses-a-branch"]


def test_a_size_that_no_operand_has_is_refused():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")

    def build(e, x, y):
        return relax.Tuple([e(op.reshape(x, [n, m])), e(op.exp(x)), y])

    mod = function(build, [(n * m,), (n, m)])
    assert refused(mod, rule(0, 1)) == ["dimension-not-among-operands"]


def test_a_rules_own_refusals_come_last_and_change_nothing():
    mod = function(in_between, [(3, 4), (3, 4)])
    assert refused(mod, rule(0, 2, legal=lambda m: refuse("no"))) == ["no"]
    assert refused(mod, rule(0, 2, worth=lambda m: refuse("too-small"))) == ["too-small"]
    with Ledger() as ledger:
        group_pass("test", [rule(0, 2, worth=lambda m: accept(bytes_saved=7, macs=3))])(mod)
    (verdict,) = ledger
    assert (verdict.bytes_saved, verdict.macs, verdict.pass_name, verdict.function) == (7, 3, "test", "decode")


def test_a_matchers_own_refusal_is_recorded():
    found = GroupRule("x", ROOTS, lambda graph, root: refuse("not-proved", root.name), "crossloom.fused_test")
    assert refused(function(in_between, [(3, 4), (3, 4)]), found) == ["not-proved"] * 4


def test_bisecting_holds_back_all_but_one_group():
    first = function(in_between, [(3, 4), (3, 4)], "prefill")
    mod = function(in_between, [(3, 4), (3, 4)], "decode", builder=relax.BlockBuilder(first))
    site = mod["decode"].body.blocks[0].bindings[0].var.name
    with Ledger() as ledger, limit_rewrites({("test", "decode", site): 1}):
        out = group_pass("test", [rule(0, 2)])(mod)
    assert ledger.counts() == {("test", "fired"): 1, ("test", "held-back"): 1}
    assert "fused_test" in lines(out["decode"]) and "fused_test" not in lines(out["prefill"])
    same_results(mod, out, *data((3, 4), (3, 4)))


def test_what_was_held_back_does_not_stand_in_the_way_of_others():
    """A group that bisecting holds back is not formed, so it cannot make another one not convex."""

    def build(e, x, y):
        a = e(op.nn.relu(x))
        d = e(op.exp(y))
        b = e(op.exp(a))
        c = e(op.nn.relu(d))
        return relax.Tuple([a, b, c, d])

    mod = function(build, [(2,), (2,)])
    site = mod["decode"].body.blocks[0].bindings[1].var.name
    with Ledger() as ledger, limit_rewrites({("two", "decode", site): 1}):
        out = group_pass("test", [rule(0, 3, name="one"), rule(1, 2, name="two")])(mod)
    assert [v.code for v in ledger] == ["held-back", "fired"] and len(regions(out)) == 1
    same_results(mod, out, *data((2,), (2,)))


# Time --------------------------------------------------------------------------------------------------------------


def many(groups):
    """Five bindings a group: a value, three siblings that read it and are apart, and their sum."""

    def build(e, x):
        value = x
        for _ in range(groups):
            a = e(op.nn.relu(value))
            b = e(op.exp(value))
            c = e(op.add(value, value))
            between = e(op.multiply(a, b))
            value = e(op.subtract(between, c))
        return value

    return function(build, [(tirx.Var("n", "int64"), 8)])


def siblings():
    def match(graph, root):
        x = graph.value[root].args[0]
        found = [v for v in graph.users[x] if graph.op(v) in ("relax.nn.relu", "relax.exp", "relax.add")]
        found = list(dict.fromkeys(found))
        return Match(graph, root, {}, frozenset(found)) if found[0].same_as(root) else None

    return GroupRule("test", ROOTS, match, "crossloom.fused_test")


@pytest.mark.timeout(300)
def test_ten_thousand_bindings_take_seconds_and_grow_linearly():
    def seconds(groups):
        mod = many(groups)
        start = time.process_time()
        out = group_pass("test", [siblings()])(mod)
        taken = time.process_time() - start
        assert len(regions(out)) == 1, "equal regions are one function"
        assert lines(out["decode"]).count("fused_test") == groups
        return taken

    seconds(20)
    small, large = seconds(200), seconds(2000)
    assert large < 20
    assert large < 25 * max(small, 0.01)


@pytest.mark.timeout(300)
def test_one_group_of_thousands_of_members_takes_seconds():
    count = 2000

    def build(e, x, *rest):
        return relax.Tuple([e(op.add(x, y)) for y in rest])

    mod = function(build, [(4,)] * (count + 1))
    start = time.process_time()
    out, codes = grouped(mod, rule(*range(count)))
    assert codes == ["fired"] and len(out["fused_test"].params) == count + 1
    assert time.process_time() - start < 20
