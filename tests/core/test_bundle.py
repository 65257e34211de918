"""Bundles: written whole or not at all, checked part by part, never extracted outside their folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tvm import relax as rx

from crossloom.bundle import Bundle, write_bundle
from crossloom.bundle.archive import unpack
from crossloom.bundle.link import arch_of, find_compiler, host_arch
from crossloom.bundle.manifest import digest, is_safe
from crossloom.bundle.weights import map_weights, write_weights
from crossloom.errors import (
    CrossloomError,
    InternalError,
    ToolchainFailed,
    ToolchainMissing,
    UnsupportedModel,
    UsageError,
)
from crossloom.model import Entry, Model, TensorSpec

TARGET = tvm.target.Target({"kind": "llvm"})


def shared_weights() -> tuple[Any, Model]:
    bb = rx.BlockBuilder()
    n = tvm.tirx.Var("n", "int64")
    for name in ("vision", "text"):
        x, w = rx.Var("x", rx.TensorType((n, 3), "float32")), rx.Var("w", rx.TensorType((3,), "float32"))
        with bb.function(name, [x, w], attrs={"num_input": 1}):
            with bb.dataflow():
                out = bb.emit_output(rx.op.add(x, w))
            bb.emit_func_output(out)
    spec = TensorSpec("x", ("n", 3), "float32")
    out_spec = TensorSpec("y", ("n", 3), "float32")
    bias = np.array([1, 2, 3], "float32")
    model = Model(
        bb.get(),
        {"a.bias": bias, "b.bias": bias.copy(), "unused": np.zeros(1000, "float32")},
        {
            "vision": Entry("vision", (spec,), (out_spec,), ("a.bias",), "image", {"n": 8}),
            "text": Entry("text", (spec,), (out_spec,), ("b.bias",), "text"),
        },
        {"encoder": "image"},
        "shared",
    )
    return tvm.compile(model.mod, target=TARGET), model


@pytest.fixture(scope="module")
def compiled() -> tuple[Any, Model]:
    return shared_weights()


def write(path: Path, compiled: tuple[Any, Model], **options: Any) -> Path:
    return write_bundle(path, executable=compiled[0], model=compiled[1], target=TARGET, **options)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, compiled: tuple[Any, Model]) -> Path:
    path = tmp_path_factory.mktemp("good") / "bundle"
    extras = {"ledger.json": b"[]", "npu/part0.rknn": b"\0\1"}
    return write(path, compiled, target_name="host", extras=extras)


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["bundle", "bundle.tar"])
def test_what_was_written_is_read(compiled, tmp_path, name) -> None:
    path = write(tmp_path / "new" / name, compiled, target_name="host", extras={"a/b.txt": b"hello"})
    assert path.is_file() == name.endswith(".tar")
    with Bundle.open(path) as bundle:
        model = compiled[1]
        assert bundle.entries == model.entries
        manifest = bundle.manifest
        assert (manifest.name, manifest.target, manifest.arch) == ("shared", "host", host_arch())
        assert manifest.modalities == {"encoder": "image"} and manifest.tvm_target["kind"] == "llvm"
        assert manifest.versions["tvm"].startswith("0.27")
        assert bundle.read("a/b.txt") == b"hello"
        with pytest.raises(UsageError, match=r"holds no `zz`.*\n.*a/b.txt"):
            bundle.read("zz")
        assert set(bundle.weights) == {"a.bias", "b.bias"}  # what no entry takes is not stored
        for weight, array in bundle.weights.items():
            np.testing.assert_array_equal(array, model.params[weight])
            assert not array.flags.writeable
        folder = bundle.folder
    assert folder.exists() == (folder == path)  # the extracted copy of a .tar goes with the bundle


def test_equal_weights_are_stored_once(good) -> None:
    assert list(load_file(good / "weights.safetensors")) == ["a.bias"]
    with Bundle.open(good) as bundle:
        assert bundle.manifest.weights == {"a.bias": "a.bias", "b.bias": "a.bias"}


def test_equal_input_gives_equal_tars(good, compiled, tmp_path) -> None:
    from crossloom.bundle.archive import pack

    names = ["manifest.json", "lib.so", "ledger.json"]
    pack(good, names, tmp_path / "1.tar")
    os.utime(good / "ledger.json", (1, 1))
    pack(good, names, tmp_path / "2.tar")
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()


@pytest.mark.parametrize("name", ["bundle", "bundle.tar"])
def test_a_bundle_is_replaced_a_strange_folder_is_not(compiled, tmp_path, name) -> None:
    path = write(tmp_path / name, compiled, extras={"old.txt": b""})
    write(path, compiled)
    with Bundle.open(path) as bundle, pytest.raises(UsageError, match="holds no"):
        bundle.read("old.txt")
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"strange.* (no bundle|is a folder)"):
        write(strange, compiled, format="tar" if name.endswith(".tar") else "dir")
    assert (strange / "thesis.txt").read_text() == "years of work"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "parts": [{"path": "thesis.txt"}]}', "{"])
def test_a_folder_with_some_manifest_is_left_alone(compiled, tmp_path, text) -> None:
    (tmp_path / "manifest.json").write_text(text)
    (tmp_path / "thesis.txt").write_text("years of work")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="no bundle; it is left alone"):
        write(tmp_path, compiled)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["thesis.txt", "npu/notes.txt", ".git/HEAD"])
def test_a_bundle_with_files_of_others_is_left_alone(compiled, copy, name) -> None:
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("years of work")
    before = contents(copy)
    with pytest.raises(UsageError, match=rf"holds '{name.split('/')[0]}.*no part of the bundle"):
        write(copy, compiled)
    assert contents(copy) == before
    (copy / name).unlink()
    shutil.rmtree(copy / ".git", ignore_errors=True)
    (copy / "lib.so").unlink()  # what is damaged may be written again
    write(copy, compiled)
    assert "npu/part0.rknn" not in contents(copy)


def test_a_tar_replaces_nothing_but_a_bundle(compiled, tmp_path) -> None:
    path = tmp_path / "out"
    strange, foreign = tmp_path / "strange.tar", tmp_path / "foreign.tar"
    write(foreign, compiled)
    with tarfile.open(foreign, "a") as archive, tarfile.open(strange, "w") as other:
        for target in (archive, other):
            target.addfile(tarfile.TarInfo("thesis.txt"), io.BytesIO())
    for data, message in (
        (b"", "no bundle"),
        (b"onnx", "no bundle"),
        (strange.read_bytes(), "no bundle"),
        (foreign.read_bytes(), "thesis.txt"),
    ):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=message):
            write(path, compiled, format="tar")
        assert path.read_bytes() == data


def fails_in_weights(model: Model) -> Model:
    params = {**model.params, "b.bias": model.params["b.bias"].astype("complex64")}
    return Model(model.mod, params, model.entries)


@pytest.mark.parametrize("name", ["bundle", "bundle.tar"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_nothing_or_the_old_one(compiled, tmp_path, name, existing) -> None:
    path = tmp_path / name
    if existing:
        write(path, compiled)
    before = sorted(p.name for p in tmp_path.iterdir())
    executable, model = compiled
    with pytest.raises(UnsupportedModel, match=r"weight `b.bias` has type complex64"):
        write_bundle(path, executable=executable, model=fails_in_weights(model), target=TARGET)
    with pytest.raises(ToolchainFailed):
        write(path, compiled, cross_compiler="false")
    with pytest.raises(ToolchainMissing, match="no-such-cc"):
        write(path, compiled, cross_compiler="no-such-cc")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    if existing:
        Bundle.open(path).close()


@pytest.mark.parametrize("name", ["bundle", "bundle.tar"])
def test_output_that_cannot_be_written(compiled, tmp_path, name) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot write"):
        write(tmp_path / "file" / name, compiled)
    assert (tmp_path / "file").read_text() == "x"
    with pytest.raises(UsageError, match="cannot write"):
        write(Path("/proc") / name, compiled)


def test_bad_extras_and_format(compiled, tmp_path) -> None:
    for name in ("../x", "/x", "lib.so", "manifest.json", "a//b", ""):
        with pytest.raises(UsageError, match="extra file"):
            write(tmp_path / "b", compiled, extras={name: b""})
    with pytest.raises(UsageError, match="unknown bundle format `zip`"):
        write(tmp_path / "b", compiled, format="zip")
    assert not list(tmp_path.iterdir())


def test_executable_and_model_must_agree(compiled, tmp_path) -> None:
    executable, model = compiled
    spec = TensorSpec("x", ("n", 3), "float32")
    for entry, says in [
        (Entry("gone", (spec,), (spec,), ("a.bias",)), "no entry `gone`"),
        (Entry("text", (spec,), (spec,)), "takes 2 parameters, the model says 1"),
        (Entry("text", (spec,), (spec,), ("zz",)), "weight `zz`"),
    ]:
        other = Model(model.mod, model.params, {entry.name: entry})
        with pytest.raises(InternalError, match=says):
            write_bundle(tmp_path / "b", executable=executable, model=other, target=TARGET)


def edit(seal: bool = False, **changes: Any) -> Callable[[Path], None]:
    """Change the manifest; `seal` makes its sha256 fit."""

    def apply(folder: Path) -> None:
        data = json.loads((folder / "manifest.json").read_text())
        for key, value in changes.items():
            data[key] = value(data[key]) if callable(value) else value
        if seal:
            data["sha256"] = digest({k: v for k, v in data.items() if k != "sha256"})
        (folder / "manifest.json").write_text(json.dumps(data))

    return apply


def spec(**changes: Any) -> Callable[[Path], None]:
    """Change the first entry's only input."""
    return edit(entries=lambda e: [{**e[0], "inputs": [{**e[0]["inputs"][0], **changes}]}, *e[1:]])


def flip(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return apply


def link_outside(folder: Path) -> None:
    (folder / "ledger.json").rename(folder.parent / "outside")
    (folder / "ledger.json").symlink_to(folder.parent / "outside")


def link_folder(folder: Path) -> None:
    (folder / "npu").rename(folder.parent / "npu")
    (folder / "npu").symlink_to(folder.parent / "npu")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "manifest.json").unlink(), "no manifest.json"),
        (lambda f: (f / "lib.so").unlink(), "`lib.so` is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "not JSON"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "not JSON"),
        (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "not text"),
        (lambda f: (f / "manifest.json").write_text("[]"), "no `format`"),
        (lambda f: (f / "ledger.json").write_text("[1]"), "3 bytes, not 2"),
        (flip("weights.safetensors"), "weights.safetensors` has changed"),
        (flip("lib.so"), "lib.so` has changed"),
        (edit(format=1), "format 1, this crossloom reads format 2"),
        (edit(format="1"), "format '1'"),
        (edit(entries=3), "TypeError"),
        (edit(entries=lambda e: [*e, e[0]]), "entry `vision` twice"),
        (edit(target={}), "KeyError"),
        (edit(weights={}), "takes weight `a.bias`, which is not listed"),
        (edit(seal=True, weights={"a.bias": "zz", "b.bias": "a.bias"}), "stored as `zz`"),
        (edit(entries=[]), "it has no entry"),
        (edit(sha256=None), "manifest.json has changed"),
        (edit(entries=lambda e: [{**e[0], "name": "sight"}, *e[1:]]), "manifest.json has changed"),
        (edit(entries=lambda e: [{**e[0], "outputs": 2 * e[0]["outputs"]}, *e[1:]]), "manifest.json has changed"),
        (spec(dtype="float33"), "`x` has the unknown type `float33`"),
        (spec(dtype="object"), "`x` has the unknown type `object`"),
        (spec(dtype="finfo"), "`x` has the unknown type `finfo`"),
        (spec(dtype="float16"), "manifest.json has changed"),
        (spec(shape=["n", 3, 1]), "manifest.json has changed"),
        (spec(shape=["n", 10**30]), f"dimension {10**30} of `x` is too large"),
        (edit(parts=lambda p: p[:1]), "`weights.safetensors` is not listed"),
        (edit(parts=lambda p: [*p, p[0]]), "listed twice"),
        (edit(parts=lambda p: [*p, {**p[0], "path": "../x"}]), "`../x` is not a plain relative path"),
        (edit(parts=lambda p: [{**p[0], "bytes": -1}, *p[1:]]), "-1"),
        (edit(parts=lambda p: [{**p[0], "sha256": "zz"}, *p[1:]]), "sha256"),
        (link_outside, "`ledger.json` is missing"),
        (link_folder, "`npu/part0.rknn` is missing"),
    ],
)
def test_damage_is_named(copy, damage, says) -> None:
    damage(copy)
    with pytest.raises(UsageError) as caught:
        Bundle.open(copy)
    assert says in str(caught.value) and str(copy) in str(caught.value)


def test_no_bundle_there(tmp_path) -> None:
    with pytest.raises(UsageError, match="no bundle at"):
        Bundle.open(tmp_path / "gone")
    (tmp_path / "text.tar").write_text("not a tar")
    with pytest.raises(UsageError, match="archive cannot be read"):
        Bundle.open(tmp_path / "text.tar")


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"x", link: str = "") -> tuple[Any, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    return info, data


@pytest.mark.parametrize(
    "members",
    [
        [member("/abs")],
        [member("../up")],
        [member("a/../../up")],
        [member("a\\b")],
        [member("./a")],
        [member("link", tarfile.SYMTYPE, link="/etc"), member("link/passwd")],
        [member("hard", tarfile.LNKTYPE, link="/etc/passwd")],
        [member("fifo", tarfile.FIFOTYPE)],
        [member("device", tarfile.CHRTYPE)],
        [member("twice"), member("twice")],
        [member("a"), member("a/b")],
        [member("../dir", tarfile.DIRTYPE)],
    ],
    ids=lambda members: members[-1][0].name,
)
def test_hostile_archives_write_nothing_outside(tmp_path, members) -> None:
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(UsageError, match="not a usable bundle"):
        unpack(path, inside)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.tar", "inside"]
    for found in inside.rglob("*"):
        assert not found.is_symlink() and not stat.S_ISFIFO(found.stat().st_mode)


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_compressed_archives_are_refused(tmp_path, mode) -> None:
    """A small compressed file may unpack to any size."""
    path = tmp_path / "bomb.tar"
    with tarfile.open(path, mode) as archive:
        info, data = member("zeros", data=b"\0" * 10_000_000)
        archive.addfile(info, io.BytesIO(data))
    with pytest.raises(UsageError, match="cannot be read"):
        unpack(path, tmp_path)


def test_sparse_members_are_refused(tmp_path) -> None:
    """A sparse member of a few bytes may claim terabytes."""
    info = tarfile.TarInfo("sparse")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "sparse",
        "GNU.sparse.realsize": str(1 << 40),
    }
    data = b"0\n".ljust(512, b"\0")
    info.size = len(data)
    path = tmp_path / "sparse.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(data))
    with pytest.raises(UsageError, match=r"not a plain file|cannot be read"):
        unpack(path, tmp_path)
    assert not (tmp_path / "sparse").exists()


@pytest.fixture(scope="module")
def tarred(compiled, tmp_path_factory) -> bytes:
    return write(tmp_path_factory.mktemp("tarred") / "b.tar", compiled).read_bytes()


def test_every_truncation_is_refused(tarred, tmp_path) -> None:
    path = tmp_path / "cut.tar"
    for cut in [0, 1, 100, 512, 700, *range(1024, len(tarred) - 11_000, len(tarred) // 20)]:
        path.write_bytes(tarred[:cut])
        with pytest.raises(UsageError):
            Bundle.open(path)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_changed_bytes_never_give_anything_but_our_errors(tmp_path_factory, tarred, data) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "b.tar"
    changed = bytearray(tarred)
    for _ in range(data.draw(st.integers(1, 4))):
        # The manifest and the headers come first; damage elsewhere is caught by the sha256.
        at = data.draw(st.integers(0, 6000))
        changed[at] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        Bundle.open(path).close()
    except CrossloomError as err:
        assert err.exit_code == 2


SHAPES = [(), (0,), (3,), (2, 0, 4), (2, 3)]
DTYPES = ["bool", "uint8", "int8", "int16", "uint32", "int64", "uint64", "float16", "float32", "float64"]
EXTENDED = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path) -> None:
    rng = np.random.default_rng(5)
    weights = {
        f"{np.dtype(dtype)}{shape}": rng.integers(0, 2, shape).astype(dtype)
        for dtype in [*DTYPES, *EXTENDED]
        for shape in SHAPES
    }
    weights["view"] = np.arange(24, dtype="float32").reshape(4, 6).T[::2]
    path = tmp_path / "w.safetensors"
    stored = write_weights(path, weights)
    tensors = map_weights(path, "w")
    for name, weight in weights.items():
        back = tensors[stored[name]].array
        assert back.dtype == weight.dtype and back.shape == weight.shape
        np.testing.assert_array_equal(back.astype("float64"), weight.astype("float64"))
    # Another reader of the same format agrees.
    ordinary = {n: w for n, w in weights.items() if w.dtype.name in DTYPES}
    stored = write_weights(path, ordinary)
    other = load_file(path)
    for name, weight in ordinary.items():
        np.testing.assert_array_equal(other[stored[name]], weight)


def test_no_weights_at_all(tmp_path) -> None:
    assert write_weights(tmp_path / "w", {}) == {}
    assert map_weights(tmp_path / "w", "w") == {}


def header(**tensor: Any) -> bytes:
    text = json.dumps({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **tensor}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{x",
        header() + b"\0" * 7,
        header(shape=[3]) + b"\0" * 8,
        header(shape=[-2]) + b"\0" * 8,
        header(shape=[2.0]) + b"\0" * 8,
        header(shape="2") + b"\0" * 8,
        header(dtype="F31") + b"\0" * 8,
        header(dtype=[]) + b"\0" * 8,
        header(data_offsets=[8, 0]) + b"\0" * 8,
        header(data_offsets=[0]) + b"\0" * 8,
        header(data_offsets=[1 << 70, (1 << 70) + 8]) + b"\0" * 8,
    ],
)
def test_damaged_weight_files(tmp_path, content) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(UsageError, match="not a usable bundle"):
        map_weights(tmp_path / "w", "b")


def test_safe_names() -> None:
    assert is_safe("a") and is_safe("a/b.c") and is_safe("..a")
    for name in ("", ".", "..", "/a", "a/", "a/..", "../a", "a/./b", "a//b", "a\0b", "a\\b"):
        assert not is_safe(name), name


def test_arch_and_compiler() -> None:
    arm = tvm.target.Target({"kind": "llvm", "mtriple": "arm64-apple-darwin"})
    assert arch_of(arm) == "aarch64" and arch_of(TARGET) == host_arch()
    with pytest.raises(ToolchainMissing, match="apt-get install g\\+\\+-riscv128-linux-gnu"):
        find_compiler("riscv128")


def test_sha256_is_of_the_whole_file(good) -> None:
    for part in json.loads((good / "manifest.json").read_text())["parts"]:
        data = (good / part["path"]).read_bytes()
        assert part["sha256"] == hashlib.sha256(data).hexdigest() and part["bytes"] == len(data)
