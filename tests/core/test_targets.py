"""Target files, the loader's strictness, target text, plugins, and what the tables answer."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest

from crossloom import entry_points as plugins
from crossloom.errors import CrossloomWarning, UnsupportedTarget, UsageError
from crossloom.targets import compatibility, get_target, list_targets, load_target_file
from crossloom.targets.model import Support

NAMES = {"rk3588", "rk3576", "rk3566", "apple-m1", "apple-m4", "imx93", "stm32f746", "esp32s3", "host"}

MINIMAL = """
name = "toy"
description = "a toy"
family = "linux"

[cpu]
kind = "llvm"
triple = "aarch64-linux-gnu"
mcpu = "cortex-a55"
source = "a manual"

[[capability]]
op = "*"
unit = "cpu"
supported = "yes"
source = "a manual"
confidence = "high"
"""


def write(tmp_path: Path, text: str, name: str = "toy.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_all_nine_are_there() -> None:
    assert set(list_targets()) == NAMES
    assert list(list_targets()) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_statement_has_a_source_and_tvm_takes_the_target(name: str) -> None:
    target = get_target(name)
    rows = [target.cpu, *target.cpu.clusters, *target.banks, *target.precisions, *target.capabilities]
    rows += [*target.fusions, *([target.npu] if target.npu else [])]
    assert len(target.capabilities) >= 3
    for row in rows:
        assert row.source.strip(), row
        assert not any(word in row.source for word in ("/work", "/shared", "/tmp", "/root")), row
    assert str(target.tvm_target().kind) == target.cpu.kind
    assert target.triple
    assert get_target(target.spec) == target
    assert hash(dataclasses.replace(target)) == hash(target)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_rows_name_operators_that_relax_has(name: str) -> None:
    import tvm

    known = set(tvm.ir.Op.list_op_names())
    named = {op for row in get_target(name).capabilities for op in row.op} - {"*"}
    assert named <= known, sorted(named - known)


#: What a statement may not rest on alone: documents and pages that were named from memory.
HEARSAY = ("data sheet", "press release", "article", "teardown", "public measurements", "product page")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_figures_from_memory_are_marked_unchecked(name: str) -> None:
    target = get_target(name)
    rows = [target.cpu, *target.cpu.clusters, *target.banks, *([target.npu] if target.npu else [])]
    sources = [row.source for row in rows] + [target.bandwidth_source]
    for source in sources:
        for word in HEARSAY:
            checked = source.partition("unchecked")[0]
            assert word not in checked, (name, source)
    assert not any(bank.verified and "unchecked" in bank.source for bank in target.banks)


SECTIONS = {
    "cluster": 'name = "a"\ncore = "b"\ncount = 1\nclock_mhz = 1\nspeed = 1',
    "bank": 'name = "a"\nunit = "cpu"\nkind = "ram"\nbytes = 1\nalign_bytes = 1',
    "precision": (
        'name = "a"\nweight = "int8"\nactivation = "int8"\nunit = "cpu"\nsupported = "yes"\nconfidence = "low"'
    ),
    "capability": 'op = "*"\nunit = "cpu"\nsupported = "yes"\nconfidence = "low"',
    "fusion": 'chain = "elementwise"\nunit = "cpu"\nmost = 3\nconfidence = "low"',
    "npu": 'codegen = ""\nplatform = "a"\ntops = 1\ncores = 1',
}


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_no_row_without_a_source(tmp_path: Path, section: str) -> None:
    head = f"[{section}]" if section == "npu" else f"[[{section}]]"
    where = {"npu": "npu", "capability": "capability[1]"}.get(section, f"{section}[0]")
    good = f"{MINIMAL}\n{head}\n{SECTIONS[section]}\n"
    load_target_file(write(tmp_path, good + 'source = "a manual"'))
    for bad in ("", 'source = ""', 'source = " "', "source = 1"):
        with pytest.raises(UsageError) as error:
            load_target_file(write(tmp_path, good + bad))
        assert f"{where}.source" in str(error.value)
    # Shared tables are held to the same.
    if section != "npu":
        write(tmp_path, f"{head}\n{SECTIONS[section]}\n", "table_own.toml")
        with pytest.raises(UsageError, match=r"table_own.*source"):
            load_target_file(write(tmp_path, MINIMAL.replace("[cpu]", "tables = ['own']\n[cpu]", 1)))


def test_a_bank_is_not_verified_by_an_unchecked_source(tmp_path: Path) -> None:
    text = f'{MINIMAL}\n[[bank]]\n{SECTIONS["bank"]}\nsource = "unchecked: a manual"\n'
    load_target_file(write(tmp_path, text + "verified = false"))
    with pytest.raises(UsageError, match=r"bank\[0\]\.verified"):
        load_target_file(write(tmp_path, text + "verified = true"))


def test_conflicting_rows_come_at_least_in_pairs() -> None:
    for target in list_targets().values():
        disputed = [r for r in target.capabilities if r.confidence == "conflict"]
        for op in {op for row in disputed for op in row.op}:
            answers = {r.supported for r in disputed if op in r.op}
            assert {"yes", "no"} <= answers, (target.name, op)


@pytest.mark.parametrize(
    ("edit", "key"),
    [
        (("family", "colour"), "family"),
        (('mcpu = "cortex-a55"', "mcpu = 55"), "cpu.mcpu"),
        (('mcpu = "cortex-a55"', 'mcu = "cortex-a55"'), "cpu.mcu"),
        (('source = "a manual"\nconfidence', "confidence"), "capability[0].source"),
        (('source = "a manual"\nconfidence', 'source = " "\nconfidence'), "capability[0].source"),
        (('confidence = "high"', 'confidence = "sure"'), "capability[0].confidence"),
        (('supported = "yes"', "supported = true"), "capability[0].supported"),
        (('op = "*"', "op = [1]"), "capability[0].op"),
        (("[cpu]", "tables = ['none-such']\n[cpu]"), "tables"),
        (("[cpu]", "bandwidth = 1e9\n[cpu]"), "bandwidth_source"),
        (("[cpu]", "bandwidth = 1e9\nbandwidth_source = ' '\n[cpu]"), "bandwidth_source"),
        (('source = "a manual"\n\n[[cap', "\n[[cap"), "cpu.source"),
        (("[cpu]", "bandwidth = -1\nbandwidth_source = 'x'\n[cpu]"), "bandwidth"),
        (('unit = "cpu"', 'unit = "cpu"\nwhen = { min_rank = "six" }'), "capability[0].when.min_rank"),
        (('unit = "cpu"', 'unit = "cpu"\nwhen = { rank = 6 }'), "capability[0].when.rank"),
        (("[[capability]]", "[capability]"), "capability"),
        (("[cpu]", "[gpu]"), "cpu"),
    ],
)
def test_a_bad_file_is_refused_by_file_and_key(tmp_path: Path, edit: tuple[str, str], key: str) -> None:
    text = MINIMAL.replace(*edit, 1)
    if edit[0] == "family":
        text = MINIMAL.replace('family = "linux"', 'family = "colour"')
    with pytest.raises(UsageError) as error:
        load_target_file(write(tmp_path, text))
    assert "toy.toml" in str(error.value) and key in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml"):
        load_target_file(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="not TOML"):
        load_target_file(write(tmp_path, "name = ["))


def test_a_file_of_ones_own_may_use_our_tables(tmp_path: Path) -> None:
    target = load_target_file(write(tmp_path, MINIMAL.replace("[cpu]", 'tables = ["armv82"]\n[cpu]', 1)))
    assert {p.name for p in target.precision_schemes()} >= {"w8a8", "w4a8", "float16"}


def test_overrides() -> None:
    target = get_target("rk3588 -cores=2 -bandwidth=20e9 -npu-cores=1 -bank.SRAM=4096")
    assert target.cpu.num_cores == 2 and int(target.tvm_target().attrs["num-cores"]) == 2
    assert target.bandwidth == 20e9 and target.npu is not None and target.npu.cores == 1
    assert target.bank("SRAM").bytes == 4096 and not target.bank("SRAM").verified
    assert get_target(target.spec) == target
    assert get_target("rk3588").cpu.num_cores == 4


@pytest.mark.parametrize(
    "spec",
    ["", "-cores=2", "rk3588 cores=2", "rk3588 -core=2", "rk3588 -cores=0", "rk3588 -cores=x",
     "rk3588 -cores=1 -cores=2", "rk3588 -bank.B0=1", '{"mcpu": "x"}', "{",
     "llvm -num-cores=two", 'rk3588 "', "host, llvm"],
)  # fmt: skip
def test_text_that_makes_no_sense(spec: str) -> None:
    with pytest.raises(UsageError):
        get_target(spec)


def test_unknown_names_get_the_closest() -> None:
    with pytest.raises(UnsupportedTarget, match=r"did you mean .*rk3588"):
        get_target("rk358")
    with pytest.raises(UnsupportedTarget, match="m4"):
        get_target("ane -chip=m9")
    with pytest.raises(UnsupportedTarget, match="3 cores"):
        get_target("rk3588 -npu-cores=4")
    with pytest.raises(UnsupportedTarget):
        get_target("llvm -no-such-option=1").tvm_target()


def test_raw_tvm_targets() -> None:
    text = "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a76 -mattr=+neon,+dotprod -num-cores=4"
    target = get_target(text)
    assert target.cpu.mattr == ("+neon", "+dotprod") and target.cpu.num_cores == 4 and target.cpu.vector_bytes == 16
    json = '{"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76",'
    same = get_target(json + ' "mattr": ["+neon", "+dotprod"], "num-cores": 4}')
    assert same.cpu == target.cpu and str(same.tvm_target()) == str(target.tvm_target())
    assert get_target("llvm").is_host and get_target("llvm").triple
    assert get_target("c -mcpu=cortex-m7").family == "micro"
    assert get_target("llvm -opt-level=3").cpu.extra == (("opt-level", 3),)


def test_composite_text() -> None:
    target = get_target("ane -chip=m4 -os=18, llvm -mtriple=arm64-apple-macos -mattr=+neon,+dotprod")
    assert target.npu is not None and target.npu.options == {"chip": "m4", "os": "18"}
    assert target.triple == "arm64-apple-macos" and target.cpu.mattr == ("+neon", "+dotprod")
    assert target.bank("B0").bytes == 192 * 1024 and not target.bank("B0").verified
    both = get_target('rknn -platform=rk3576, {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}')
    assert both.npu is not None and both.npu.platform == "rk3576" and both.supports_precision("w4a16")


def test_host_is_this_machine() -> None:
    host = get_target("host")
    assert host.is_host and host.cpu.mcpu and host.cpu.num_cores >= 1
    assert host.cpu.vector_bytes in (16, 32, 64)
    assert get_target("host") == host
    assert not get_target("stm32f746").is_host


class Entry:
    """Stands in for an installed entry point."""

    name, value = "toys", "toys:paths"

    def __init__(self, loaded: object) -> None:
        self.loaded = loaded

    def load(self) -> object:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def test_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, MINIMAL)

    def install(loaded: object) -> None:
        real = importlib.metadata.entry_points

        def entry_points(**kw: str) -> object:
            return [Entry(loaded)] if kw.get("group") == "crossloom.targets" else real(**kw)

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    for loaded in (str(path), path, lambda: path, lambda: [path]):
        install(loaded)
        assert get_target("toy -cores=3").cpu.num_cores == 3
    install(ImportError("no module named toys"))
    with pytest.warns(CrossloomWarning, match=r"toys.*no module"):
        assert "rk3588" in list_targets()
    with pytest.raises(UnsupportedTarget, match=r"plugins left out.*no module named toys"):
        get_target("toy")
    install(str(write(tmp_path, MINIMAL.replace('"toy"', '"rk3588"'), "clash.toml")))
    monkeypatch.setattr(plugins, "_broken", {})
    with pytest.warns(CrossloomWarning, match="'rk3588'.*exists already"):
        assert list_targets()["rk3588"].name == "rk3588"


def test_precision_is_one_table() -> None:
    def names(target: str, unit: str | None = None) -> set[str]:
        return {p.name for p in get_target(target).precision_schemes(unit)}

    assert "w4a16" not in names("rk3588") and "w4a16" in names("rk3576")
    assert "w8a8" in names("apple-m4") and "w8a8" not in names("apple-m1")
    assert {"w8a8", "w4a8"} <= names("rk3588", "cpu")
    rk3588 = get_target("rk3588").supports("relax.matmul", "float32", precision="w4a16")
    assert rk3588.answer == "no" and "rk3576" in rk3588.source
    m4 = get_target("apple-m4")
    assert m4.supports_precision("w4a16", granularity="channel").answer == "yes"
    per_block = m4.supports_precision("w4a16", granularity="group32")
    assert per_block.answer == "no" and "2510" in per_block.source
    assert get_target("rk3576").supports_precision("w4a16", granularity="group48").answer == "no"
    assert get_target("apple-m4 -os=17").supports_precision("w4a16", granularity="channel").answer == "no"
    assert m4.supports_precision("w3a3").answer == "unknown"


def test_what_the_tables_answer() -> None:
    rk3588, rk3576, rk3566, m1, m4 = map(get_target, ("rk3588", "rk3576", "rk3566", "apple-m1", "apple-m4"))
    conv = rk3588.supports("relax.nn.conv2d", "float32", (1, 3, 32, 32), (8, 3, 3, 3), (1, 8, 30, 30))
    assert conv.answer == "yes" and conv.computed_in == "float16" and "rknn-toolkit2" in conv.source
    assert rk3588.supports("relax.nn.conv2d", "float32", ("n", 3, 32, 32)).answer == "no"
    assert rk3588.supports("relax.nn.conv2d", "float32", ("n", 3, 32, 32), unit="cpu").answer == "yes"
    assert [t.supports("relax.sin", "float16", (1, 8)).answer for t in (rk3588, rk3576)] == ["no", "yes"]
    assert rk3566.supports("relax.add", "float16", (1,) * 6).answer == "no"
    assert rk3588.supports("relax.add", "float16", (1,) * 6).answer == "yes"
    assert rk3576.supports("relax.nn.attention", "float16", (1, 8, 4, 64)).answer == "unknown"
    assert rk3576.supports("relax.nn.softmax", "float16", (1, 9000)).answer == "no"
    assert rk3588.supports("relax.nn.softmax", "float16", (1, 8192)).answer == "yes"
    big = ((1, 64, 1, 32000),)
    assert [t.supports("relax.add", "float16", *big).answer for t in (m1, m4)] == ["no", "yes"]
    assert m4.supports("relax.add", "float16", (1, 2, 3, 4, 5, 6)).answer == "no"
    kernel = ((1, 3, 64, 64), (8, 3, 14, 14), (1, 8, 51, 51))
    assert [t.supports("relax.nn.conv2d", "float16", *kernel).answer for t in (m1, m4)] == ["no", "yes"]
    nobody = m4.supports("relax.multinomial_from_uniform", "float16")
    assert nobody == Support("unknown", None, "npu") and not nobody and nobody.source == ""
    assert get_target("host").supports("relax.add", unit="npu").answer == "no"


def test_compatibility_map() -> None:
    rows = {(r.target, r.unit): r for r in compatibility("conv2d")}
    assert set(rows) == {(t.name, unit) for t in list_targets().values() for unit in t.units}
    assert rows["rk3588", "npu"].answer == "yes" and rows["rk3588", "npu"].source
    assert rows["imx93", "npu"].answer == "conditional"
    assert rows["apple-m1", "npu"].answer == "conditional"
    gather = {(r.target, r.unit): r for r in compatibility("relax.take")}
    assert gather["apple-m4", "npu"].answer == "no" and gather["rk3588", "npu"].answer == "conditional"
    assert [r.target for r in compatibility("matmul", [get_target("host")])] == ["host"]
    with pytest.raises(UsageError, match=r"did you mean .*conv2d"):
        compatibility("conv2")
