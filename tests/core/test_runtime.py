"""Sessions: one interface in process, in a process of its own, under QEMU and over TCP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax as rx
from tvm import rpc
from tvm.rpc import base as rpc_base

from crossloom.bundle import Bundle, write_bundle
from crossloom.bundle.link import host_arch
from crossloom.errors import InternalError, ToolchainFailed, ToolchainMissing, UsageError
from crossloom.model import Entry, Model, TensorSpec
from crossloom.runtime import DeviceTensor, Session, open_session
from crossloom.runtime.board import Board
from crossloom.runtime.board_libs import runtime_libs
from crossloom.runtime.cross import server_program

HOST = {"kind": "llvm"}
ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76", "mattr": ["+neon"]}
DEVICES = [
    pytest.param("host"),
    pytest.param("host-process"),
    pytest.param("qemu", marks=pytest.mark.aarch64),
]


def two_entries() -> Model:
    """`scores`: dynamic rows, nested tuple; `lookup`: int64 ids into the same table; `step`: a growing cache."""
    rng = np.random.default_rng(3)
    table = rng.standard_normal((7, 4)).astype("float32")
    half = rng.standard_normal((4,)).astype("float16")
    bb = rx.BlockBuilder()
    n, m = tvm.tirx.Var("n", "int64"), tvm.tirx.Var("m", "int64")

    x = rx.Var("x", rx.TensorType((n, 7), "float32"))
    h = rx.Var("h", rx.TensorType((4,), "float16"))
    w, v = rx.Var("table", rx.TensorType((7, 4), "float32")), rx.Var("half", rx.TensorType((4,), "float16"))
    with bb.function("scores", [x, h, w, v], attrs={"num_input": 2}):
        with bb.dataflow():
            y = bb.emit(rx.op.matmul(x, w))
            flat = bb.emit(rx.op.reshape(y, (n * 4,)))
            z = bb.emit(rx.op.add(h, v))
            out = bb.emit_output(rx.Tuple([flat, rx.Tuple([z, x])]))
        bb.emit_func_output(out)

    ids = rx.Var("ids", rx.TensorType((m,), "int64"))
    w2 = rx.Var("table", rx.TensorType((7, 4), "float32"))
    with bb.function("lookup", [ids, w2], attrs={"num_input": 1}):
        with bb.dataflow():
            out = bb.emit_output(rx.op.take(w2, ids, axis=0))
        bb.emit_func_output(out)

    p = tvm.tirx.Var("past", "int64")
    cache, new = (rx.Var("cache", rx.TensorType((p, 4), "float32")), rx.Var("new", rx.TensorType((1, 4), "float32")))
    mask = rx.Var("mask", rx.TensorType((p + 1,), "bool"))
    with bb.function("step", [cache, new, mask], attrs={"num_input": 3}):
        with bb.dataflow():
            whole = bb.emit_output(rx.op.concat([cache, new], axis=0))
            kept = bb.emit(rx.op.astype(mask, "float32"))
            total = bb.emit_output(rx.op.sum(rx.op.multiply(whole, rx.op.expand_dims(kept, 1)), axis=[0]))
            out = bb.emit_output(rx.Tuple([whole, total]))
        bb.emit_func_output(out)

    spec = TensorSpec
    entries = {
        "scores": Entry(
            "scores",
            (spec("x", ("n", 7), "float32"), spec("h", (4,), "float16")),
            (spec("flat", ("4*n",), "float32"), spec("z", (4,), "float16"), spec("same", ("n", 7), "float32")),
            ("table", "half"),
            upper_bounds={"n": 64},
        ),
        "lookup": Entry(
            "lookup",
            (spec("ids", ("m",), "int64"),),
            (spec("rows", ("m", 4), "float32"),),
            ("table",),
            lower_bounds={"m": 1},
        ),
        "step": Entry(
            "step",
            (
                spec("cache", ("past", 4), "float32"),
                spec("new", (1, 4), "float32"),
                spec("mask", ("past + 1",), "bool"),
            ),
            (spec("present", ("past + 1", 4), "float32"), spec("total", (4,), "float32")),
        ),
    }
    return Model(bb.get(), {"table": table, "half": half}, entries, {"scores": "text"}, "two")


def bundle_for(folder: Path, target: dict[str, object], model: Model) -> Path:
    tvm_target = tvm.target.Target(target)
    path = folder / "bundle"
    executable = tvm.compile(model.mod, target=tvm_target)
    return write_bundle(path, executable=executable, model=model, target=tvm_target)


@pytest.fixture(scope="module")
def model() -> Model:
    return two_entries()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, model: Model) -> dict[str, Path]:
    return {"host": bundle_for(tmp_path_factory.mktemp("host"), HOST, model)}


@pytest.fixture(scope="module", params=DEVICES)
def session(
    request: pytest.FixtureRequest, bundles: dict[str, Path], model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    device = request.param
    if device == "qemu":
        path = bundle_for(tmp_path_factory.mktemp("arm"), ARM, model)
    else:
        path = bundles["host"]
    with open_session(path, device) as opened:
        yield opened


@pytest.mark.parametrize("rows", [1, 5, 64, 0])
def test_dynamic_rows_nested_tuple_and_half(session: Session, model: Model, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, h = rng.standard_normal((rows, 7)).astype("float32"), rng.standard_normal(4).astype("float16")
    flat, z, same = session.run("scores", {"h": h, "x": x})
    np.testing.assert_allclose(flat, (x.astype("float64") @ model.params["table"]).ravel(), rtol=1e-4, atol=1e-5)
    assert z.dtype == np.float16
    np.testing.assert_allclose(z, h + model.params["half"], rtol=2e-3)
    np.testing.assert_array_equal(same, x)


def test_int64_ids_share_the_table(session: Session, model: Model) -> None:
    ids = np.array([6, 0, 3, 3], "int64")
    (rows,) = session.run("lookup", {"ids": ids})
    np.testing.assert_array_equal(rows, model.params["table"][ids])
    session.run("scores", {"x": np.zeros((1, 7), "float32"), "h": np.zeros(4, "float16")})
    assert sorted(session._weights) == ["half", "table"]  # one copy of the table for both entries


def test_kept_state_never_leaves_the_device(session: Session) -> None:
    rng = np.random.default_rng(9)
    cache: object = np.zeros((0, 4), "float32")
    rows: list[np.ndarray] = []
    for step in range(4):
        rows.append(rng.standard_normal((1, 4)).astype("float32"))
        mask = np.arange(step + 1) % 2 == 0
        cache, total = session.run("step", {"cache": cache, "new": rows[-1], "mask": mask}, keep={"present"})
        assert isinstance(cache, DeviceTensor)
        whole = np.concatenate(rows)
        np.testing.assert_allclose(total, (whole * mask[:, None]).sum(0), rtol=1e-5, atol=1e-6)
    assert cache.shape == (4, 4)
    np.testing.assert_array_equal(cache.numpy(), whole)


def test_an_input_returned_as_output_outlives_the_call(session: Session) -> None:
    x = np.arange(14, dtype="float32").reshape(2, 7)
    h = np.zeros(4, "float16")
    _, _, same = session.run("scores", {"x": x, "h": h}, keep=["same"])
    for _ in range(3):  # would reuse the memory if it were free
        session.run("scores", {"x": x + 100, "h": h})
    np.testing.assert_array_equal(same.numpy(), x)


def test_time_counts_calls_on_the_device(session: Session) -> None:
    seconds = session.time("lookup", {"ids": np.arange(7)}, repeat=3, number=2)
    assert len(seconds) == 3 and all(0 < value < 5 for value in seconds)


def test_fortran_order_and_views_are_inputs_too(session: Session, model: Model) -> None:
    x = np.asfortranarray(np.random.default_rng(1).standard_normal((3, 14)).astype("float32"))[:, ::2]
    flat, _, _ = session.run("scores", {"x": x, "h": np.zeros(4, "float16")})
    np.testing.assert_allclose(flat.reshape(3, 4), x @ model.params["table"], rtol=1e-4, atol=1e-5)


H = np.zeros(4, "float16")
X = np.zeros((2, 7), "float32")


@pytest.mark.parametrize(
    ("entry", "inputs", "keep", "says"),
    [
        ("nope", {}, (), ["no entry `nope`", "scores, lookup, step"]),
        ("scores", {"x": X}, (), ["needs input `h`", "x, h"]),
        ("scores", {"x": X, "h": H, "y": H}, (), ["no input `y`"]),
        ("scores", {"x": X.astype("float64"), "h": H}, (), ["`x`", "float64", "wanted float32", "astype"]),
        ("scores", {"x": X[:, :6], "h": H}, (), ["`x`", "(2, 6)", "(n, 7)"]),
        ("scores", {"x": X[0], "h": H}, (), ["`x`", "(7,)", "(n, 7)"]),
        ("scores", {"x": np.zeros((65, 7), "float32"), "h": H}, (), ["n = 65", "at most 64"]),
        ("lookup", {"ids": np.zeros(0, "int64")}, (), ["m = 0", "at least 1"]),
        ("scores", {"x": X, "h": H}, ("zz",), ["no output `zz`", "flat, z, same"]),
        (
            "step",
            {"cache": np.zeros((2, 4), "float32"), "new": np.zeros((1, 4), "float32"), "mask": np.ones(2, bool)},
            (),
            ["`mask`", "past + 1 = 3"],
        ),
    ],
)
def test_wrong_calls_name_the_thing(bundles, entry, inputs, keep, says) -> None:
    with open_session(bundles["host"], "host") as session, pytest.raises(UsageError) as caught:
        session.run(entry, inputs, keep)
    for words in says:
        assert words in str(caught.value)


def test_one_symbol_is_one_size() -> None:
    from crossloom.runtime.checks import check_inputs

    spec = TensorSpec
    entry = Entry("e", (spec("a", ("n", 2), "float32"), spec("b", ("n",), "float32")), ())
    good = {"a": np.zeros((3, 2), "float32"), "b": np.zeros(3, "float32")}
    assert check_inputs(entry, good) == {"n": 3}
    with pytest.raises(UsageError, match=r"`b`.*n = 4.*`a` has n = 3"):
        check_inputs(entry, {**good, "b": np.zeros(4, "float32")})


def test_derived_dimensions_are_checked_when_known() -> None:
    from crossloom.runtime.checks import evaluate

    assert evaluate("4*(past + seq) - 1", {"past": 2, "seq": 3}) == 19
    assert evaluate("n // 2", {"n": 7}) == 3
    assert evaluate("n // 0", {"n": 7}) is None
    assert evaluate("other + 1", {"n": 7}) is None
    assert evaluate("__import__('os').getpid()", {}) is None


def test_tensor_of_another_session_is_refused(bundles) -> None:
    with open_session(bundles["host"], "host") as one, open_session(bundles["host"], "host") as two:
        _, _, same = one.run("scores", {"x": X, "h": H}, keep=["same"])
        with pytest.raises(UsageError, match="another session"):
            two.run("scores", {"x": same, "h": H})


def test_closed_session_and_its_tensors(bundles) -> None:
    session = open_session(bundles["host"], "host")
    _, _, same = session.run("scores", {"x": X, "h": H}, keep=["same"])
    session.close()
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.run("scores", {"x": X, "h": H})
    with pytest.raises(UsageError, match="closed"):
        same.numpy()


def test_killed_server_is_an_error_not_a_crash(bundles) -> None:
    with open_session(bundles["host"], "host-process") as session:
        session.run("scores", {"x": X, "h": H})
        os.kill(session._connection.pid, signal.SIGSEGV)
        with pytest.raises(ToolchainFailed) as caught:
            session.run("scores", {"x": X, "h": H})
        assert caught.value.returncode == -signal.SIGSEGV
        assert "crossloom_rpc" in str(caught.value)


def test_hung_server_meets_its_time_limit(bundles) -> None:
    with open_session(bundles["host"], "host-process", timeout_s=30) as session:
        session.run("scores", {"x": X, "h": H})
        session.timeout_s = 0.5
        os.kill(session._connection.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(ToolchainFailed, match="timed out"):
            session.run("scores", {"x": X, "h": H})
        assert time.monotonic() - begin < 20


@pytest.mark.parametrize("device", ["host", "host-process"])
def test_error_of_the_model_leaves_the_session_usable(bundles, device) -> None:
    with open_session(bundles["host"], device) as session:
        # The declared signature is changed, so that only the compiled model's own check can refuse.
        real = session.bundle.entries["lookup"]
        session.bundle.entries["lookup"] = Entry(
            "lookup", (TensorSpec("ids", ("m", 1), "int64"),), real.outputs, real.weights
        )
        with pytest.raises(InternalError, match="compiled model failed"):
            session.run("lookup", {"ids": np.zeros((2, 1), "int64")})
        session.bundle.entries["lookup"] = real
        (rows,) = session.run("lookup", {"ids": np.array([1])})
        assert rows.shape == (1, 4)


def test_no_process_and_no_folder_is_left(bundles, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    session = open_session(bundles["host"], "host-process")
    pid = session._connection.pid
    assert list(tmp_path.iterdir())
    session.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_wrong_device_or_machine(bundles, tmp_path, model) -> None:
    with pytest.raises(UsageError, match="unknown device `gpu`"):
        open_session(bundles["host"], "gpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs an address"):
        open_session(bundles["host"], "rpc")
    with pytest.raises(UsageError, match="no address"):
        open_session(bundles["host"], "rpc", address="somewhere")
    with pytest.raises(ToolchainFailed, match="nothing answers"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))  # bound but not listening: refused at once
            open_session(bundles["host"], "rpc", address=f"127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(ToolchainMissing, match="qemu-none not found"):
        open_session(bundles["host"], "qemu", emulator="qemu-none")


@pytest.mark.aarch64
def test_arm_bundle_does_not_run_here(tmp_path, model) -> None:
    path = bundle_for(tmp_path, ARM, model)
    if host_arch() != "aarch64":
        with pytest.raises(UsageError, match="compiled for aarch64"):
            open_session(path, "host")
    assert Bundle.open(path).manifest.arch == "aarch64"


def test_no_compiler_for_a_machine() -> None:
    with pytest.raises(ToolchainMissing, match="apt-get install g\\+\\+"):
        server_program("aarch64", cross_compiler="no-such-compiler")


@pytest.fixture
def board(tmp_path: Path) -> Iterator[str]:
    """Our server over TCP, as on a board; yields its address."""
    program, libs = server_program(host_arch()), runtime_libs(host_arch())
    process = subprocess.Popen(
        [str(program), "--workdir", str(tmp_path), "--libs", str(libs), "--port", "0", "--key", "board"],
        env={**os.environ, "LD_LIBRARY_PATH": str(libs)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        assert words[:2] == ["listening", "on"]
        yield words[2]
    finally:
        process.kill()
        process.wait()


def test_board_over_tcp(bundles, board, tmp_path, model) -> None:
    assert board.startswith("127.0.0.1:")
    with open_session(bundles["host"], "rpc", address=board, key="board") as session:
        (rows,) = session.run("lookup", {"ids": np.array([2])})
        np.testing.assert_array_equal(rows, model.params["table"][[2]])
    deadline = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())  # the connection's folder went with it
    with pytest.raises(ToolchainFailed):
        open_session(bundles["host"], "rpc", address=board, key="other")
    with open_session(bundles["host"], "rpc", address=board, key="board") as session:
        session.run("lookup", {"ids": np.array([2])})


@contextlib.contextmanager
def tracker_of(board: tuple[str, int, str]) -> Iterator[str]:
    """A tracker that answers every request with one board; yields its address.  (TVM's own needs tornado.)"""
    magic = struct.pack("<i", rpc_base.RPC_TRACKER_MAGIC)

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer, contextlib.suppress(OSError):
                    if peer.recv(4) != magic:
                        continue
                    peer.sendall(magic)
                    code, key, _, _ = rpc_base.recvjson(peer)
                    known = code == rpc_base.TrackerCode.REQUEST and key == board[2]
                    rpc_base.sendjson(peer, [0, list(board)] if known else [-1, f"no board `{key}`"])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def stock_server(key: str) -> Iterator[int]:
    """TVM's own Python server in a process of its own; yields its port.  (rpc.Server needs cloudpickle.)"""
    code = (
        "import sys; from tvm.rpc.server import PopenRPCServerState as State\n"
        "print(State('127.0.0.1', 19300, 19400, key=sys.argv[1], silent=True).port, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, key], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_stock_tvm_server_behind_a_tracker(bundles, model) -> None:
    """The stock server lacks our helpers: weights are copied there, results are the same."""
    with stock_server("rk") as port, tracker_of(("127.0.0.1", port, "rk")) as address:
        with open_session(bundles["host"], "rpc", address=address, key="rk", tracker=True) as session:
            x, h = np.random.default_rng(4).standard_normal((3, 7)).astype("float32"), np.ones(4, "float16")
            flat, z, same = session.run("scores", {"x": x, "h": h}, keep=["z"])
            np.testing.assert_allclose(flat.reshape(3, 4), x @ model.params["table"], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(z.numpy(), h + model.params["half"], rtol=2e-3)
            np.testing.assert_array_equal(same, x)
            assert len(session.time("lookup", {"ids": np.array([1])}, repeat=2)) == 2
        with pytest.raises(ToolchainFailed, match="no board `zz`"):
            open_session(bundles["host"], "rpc", address=address, key="zz", tracker=True)
        with pytest.raises(UsageError, match="needs a key"):
            open_session(bundles["host"], "rpc", address=address, tracker=True)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Accepts connections and never says a word; yields its address."""
    peers: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peers.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for peer in peers:
        peer.close()


def test_server_that_never_answers(silent_server) -> None:
    begin = time.monotonic()
    with pytest.raises(ToolchainFailed, match="timed out"):
        Board(silent_server, connect_seconds=0.5)
    assert time.monotonic() - begin < 20


def test_number_of_a_socket_that_was_closed_may_be_given_to_the_connection(silent_server, monkeypatch) -> None:
    """Closed behind the first look at what is open, as the garbage collector does it: the number is TVM's then."""
    host, port = silent_server.split(":")
    old = socket.create_connection((host, int(port)))
    connect = rpc.connect

    def late(*args: Any, **kwargs: Any) -> Any:
        old.close()
        time.sleep(1.2)  # the watchdog has nothing to hang up on yet
        return connect(*args, **kwargs)

    monkeypatch.setattr("crossloom.runtime.board.rpc.connect", late)
    with pytest.raises(ToolchainFailed, match="timed out"):
        Board(silent_server, connect_seconds=0.5)


def test_board_that_falls_silent(bundles, board) -> None:
    with open_session(bundles["host"], "rpc", address=board, key="board", timeout_s=30) as session:
        ids = {"ids": np.array([2])}
        session.run("lookup", ids)
        session.timeout_s = 0.5
        descendants = _descendants(os.getpid())
        for pid in descendants:
            os.kill(pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            with pytest.raises(ToolchainFailed, match="timed out"):
                session.run("lookup", ids)
            assert time.monotonic() - begin < 20
        finally:
            for pid in descendants:
                os.kill(pid, signal.SIGCONT)


def _descendants(root: int) -> list[int]:
    """The server programs among the processes started, directly or not, by `root`."""
    found, todo = [], [root]
    while todo:
        parent = todo.pop()
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        todo += [int(child) for child in children]
        found += [int(c) for c in children if "crossloom_rpc" in Path(f"/proc/{c}/cmdline").read_text()]
    return found


def test_server_refuses_names_outside_its_folder(bundles) -> None:
    with open_session(bundles["host"], "host-process") as session:
        remote = session._connection.session
        for name in ("../x", "/etc/x", "a/b", "", ".."):
            with pytest.raises(Exception, match="plain name"):
                remote.get_function("tvm.rpc.server.upload")(name, bytearray(b"x"))


def test_tensors_are_read_whole_or_not_at_all(bundles, model) -> None:
    with open_session(bundles["host"], "host-process") as session:
        name = session._connection.share(session.bundle.folder / "weights.safetensors")
        read = session._connection.session.get_function("crossloom.rpc.read_tensor")
        offset = session.bundle.weight_offsets["table"]
        np.testing.assert_array_equal(read(name, offset, "float32", 7, 4).numpy(), model.params["table"])
        assert read(name, offset, "float32", 0, 4).numpy().shape == (0, 4)
        for arguments in [(name, offset, "float32", 1 << 40), (name, -1, "uint8", 1), (name, 0, "uint8", -1)]:
            with pytest.raises(Exception, match=r"too short|bad shape"):
                read(*arguments)
        with pytest.raises(Exception, match="bad shape"):
            read(name, 0, "float32", 1 << 40, 1 << 40)
        with pytest.raises(Exception, match="plain name"):
            read("../log", 0, "uint8", 1)


@pytest.mark.parametrize(
    "arguments", [[], ["--workdir", "x"], ["1"], ["--workdir", "x", "--libs", "y", "--port", "z"], ["--nope"]]
)
def test_server_usage_errors(arguments) -> None:
    libs = runtime_libs(host_arch())
    done = subprocess.run(
        [str(server_program(host_arch())), *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": str(libs)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.startswith("crossloom_rpc: ")


def test_server_without_runtime_libraries(tmp_path) -> None:
    libs = runtime_libs(host_arch())
    done = subprocess.run(
        [str(server_program(host_arch())), "--workdir", str(tmp_path), "--libs", str(tmp_path), "--port", "0"],
        env={**os.environ, "LD_LIBRARY_PATH": str(libs)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "libtvm_runtime.so" in done.stderr
