"""Run the entries of a bundle: in this process, in one of its own, under QEMU or on a board."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tvm
from tvm import relax

from crossloom.bundle import Bundle
from crossloom.bundle.manifest import WEIGHTS
from crossloom.errors import CrossloomError, InternalError, UsageError
from crossloom.model import Entry
from crossloom.runtime.checks import check_inputs

_MAX_RUNS = 1_000_000


class Connection(Protocol):
    """Something at whose other end a TVM RPC server runs."""

    session: Any

    def limit(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Bound the time of the body."""

    def failure(self, err: Exception) -> Exception:
        """Explain an error."""

    def close(self) -> None:
        """Hang up."""


@runtime_checkable
class SharesFiles(Protocol):
    """A connection whose server reads this machine's files."""

    session: Any

    def share(self, path: Path) -> str:
        """Show a file to the server."""


def _load_private(library: Path) -> Any:
    """Load a copy of a library that no one else has: the system takes a path that is loaded for the same library,
    though its file has been replaced since, and two modules of one library share its state."""
    with tempfile.TemporaryDirectory(prefix="crossloom-library-") as folder:
        copy = Path(folder) / library.name
        shutil.copyfile(library, copy)
        # What is mapped outlives the name of its file; its inode is not given to another meanwhile.
        return tvm.runtime.load_module(str(copy))


class DeviceTensor:
    """An output that stayed on the device; pass it as an input of a later call of the same session.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    """

    def __init__(self, session: Session, tensor: Any) -> None:
        self._session, self._tensor = session, tensor
        self.shape: tuple[int, ...] = tuple(int(n) for n in tensor.shape)
        self.dtype = np.dtype(str(tensor.dtype))

    def numpy(self) -> np.ndarray:
        """Copy it to the host."""
        return self._session._fetch(self)

    def __repr__(self) -> str:
        return f"DeviceTensor(shape={self.shape}, dtype={self.dtype})"


class Session:
    """A loaded bundle; get one from :func:`crossloom.runtime.open_session`, close it or use ``with``.

    Weights go to the device once, on the first call of an entry that takes them, and stay.

    Parameters
    ----------
    bundle : Bundle
        Stays open as long as the session.
    connection : Connection or None
        None runs in this process, where no time limit can be kept.
    device : str
        Name for messages.
    timeout_s : float
        Longest time of one call, in seconds.
    owns_bundle : bool
        Whether closing the session closes the bundle.
    """

    def __init__(
        self,
        bundle: Bundle,
        connection: Connection | None,
        device: str,
        timeout_s: float = 600.0,
        owns_bundle: bool = False,
    ) -> None:
        self.bundle, self.device, self.timeout_s = bundle, device, timeout_s
        self._connection = connection
        self._owns_bundle = owns_bundle
        self._bound: set[str] = set()
        self._weights: dict[str, Any] = {}
        self._closed = False
        with self._talking():
            if connection is None:
                module, self._device = _load_private(bundle.library), tvm.cpu(0)
            else:
                connection.session.upload(str(bundle.library))
                module = connection.session.load_module(bundle.library.name)
                self._device = connection.session.cpu(0)
            self._vm: Any = relax.VirtualMachine(module, self._device)

    def run(
        self,
        entry: str,
        inputs: Mapping[str, np.ndarray | DeviceTensor],
        keep: Collection[str] = (),
    ) -> list[Any]:
        """Call one entry.

        Parameters
        ----------
        entry : str
        inputs : mapping of str to numpy.ndarray or DeviceTensor
            By name, all of them, of exactly the declared types.
        keep : collection of str
            Names of outputs that stay on the device.

        Returns
        -------
        outputs : list of numpy.ndarray or DeviceTensor
            In the order of ``bundle.entries[entry].outputs``; nested tuples flattened.

        Raises
        ------
        UsageError
            An unknown entry or output, or an input that is missing, unknown, or of the wrong type or shape.
        ToolchainFailed
            The process that runs the model crashed or took longer than ``timeout_s``.
        InternalError
            The compiled model raised an error.
        """
        spec = self._entry(entry)
        names = [output.name for output in spec.outputs]
        for name in keep:
            if name not in names:
                raise UsageError(f"entry `{entry}` has no output `{name}`", f"its outputs: {', '.join(names)}")
        arrays = self._checked(spec, inputs)
        with self._talking():
            self._bind(spec)
            call = f"{entry}#call"
            save = self._vm.module["save_function"]
            save(f"{entry}#bound", call, 1, *self._upload(arrays))
            try:
                results = list(self._flatten(self._vm.module[call]()))
            except Exception:
                with contextlib.suppress(Exception):
                    save(f"{entry}#bound", call, 1)
                raise
            save(f"{entry}#bound", call, 1)  # lets go of this call's inputs
            if len(results) != len(names):
                raise InternalError(f"entry `{entry}` returned {len(results)} tensors, declared {len(names)}")
            return [
                DeviceTensor(self, result) if name in keep else result.numpy() for name, result in zip(names, results)
            ]

    def time(
        self,
        entry: str,
        inputs: Mapping[str, np.ndarray | DeviceTensor],
        repeat: int = 3,
        number: int = 1,
    ) -> list[float]:
        """Time one entry on the device itself, without transfers.

        Parameters
        ----------
        repeat : int
            Measurements.
        number : int
            Calls averaged in one measurement.

        Returns
        -------
        seconds : list of float
            Seconds of one call, one value a measurement.
        """
        spec = self._entry(entry)
        if not (1 <= repeat and 1 <= number and repeat * number <= _MAX_RUNS):
            raise UsageError(f"repeat = {repeat} and number = {number} must be positive, together <= {_MAX_RUNS}")
        arrays = self._checked(spec, inputs)
        with self._talking():
            self._bind(spec)
            call = f"{entry}#time"
            save = self._vm.module["save_function"]
            save(f"{entry}#bound", call, 0, *self._upload(arrays))
            measured = self._vm.time_evaluator(call, self._device, number=number, repeat=repeat)()
            save(f"{entry}#bound", call, 0)
            return [float(seconds) for seconds in measured.results]

    def close(self) -> None:
        """Let go of the device; kept tensors become unusable."""
        if self._closed:
            return
        self._closed = True
        self._vm = self._device = None
        self._weights = {}
        if self._connection is not None:
            self._connection.close()
        if self._owns_bundle:
            self.bundle.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def _entry(self, name: str) -> Entry:
        if self._closed:
            raise UsageError("the session is closed", "open another one")
        return self.bundle.entry(name)

    def _checked(self, entry: Entry, inputs: Mapping[str, np.ndarray | DeviceTensor]) -> list[Any]:
        arrays: dict[str, Any] = {}
        for name, value in inputs.items():
            if isinstance(value, DeviceTensor):
                if value._session is not self:
                    raise UsageError(f"input `{name}` is a tensor of another session", "pass its .numpy()")
                arrays[name] = value
            else:
                arrays[name] = np.asarray(value, order="C")
        check_inputs(entry, arrays)
        return [arrays[spec.name] for spec in entry.inputs]

    def _upload(self, arrays: Sequence[Any]) -> list[Any]:
        return [
            array._tensor if isinstance(array, DeviceTensor) else tvm.runtime.tensor(array, self._device)
            for array in arrays
        ]

    def _bind(self, entry: Entry) -> None:
        """Save the entry with its weights bound, once."""
        if entry.name in self._bound:
            return
        tensors = []
        for name in entry.weights:
            stored = self.bundle.manifest.weights[name]
            if stored not in self._weights:
                self._weights[stored] = self._load_weight(name)
            tensors.append(self._weights[stored])
        saved = f"{entry.name}#bound"
        views = self._bind_views()
        if views is not None:
            views(self._vm.module, entry.name, saved, *tensors)
        else:
            self._vm.module["save_function"](entry.name, saved, 1, *tensors)
        self._bound.add(entry.name)

    def _load_weight(self, name: str) -> Any:
        weight = np.asarray(self.bundle.weights[name])
        connection = self._connection
        if isinstance(connection, SharesFiles):
            read = connection.session.get_function("crossloom.rpc.read_tensor")
            file = connection.share(self.bundle.folder / WEIGHTS)
            return read(file, self.bundle.weight_offsets[name], str(weight.dtype), *weight.shape)
        return tvm.runtime.tensor(weight, self._device)

    def _bind_views(self) -> Any:
        """Our server's way to bind weights without a copy; another server, and this process, have none."""
        if self._connection is None:
            return None
        try:
            return self._connection.session.get_function("crossloom.rpc.bind_views")
        except Exception:  # "not found" has no type of its own; a lost connection shows in the next call
            return None

    def _flatten(self, value: Any) -> Iterator[Any]:
        if isinstance(value, tvm.runtime.Tensor):
            yield value
        elif self._connection is not None:
            size = self._connection.session.get_function("ffi.ArraySize")(value)
            item = self._connection.session.get_function("ffi.ArrayGetItem")
            for index in range(size):
                yield from self._flatten(item(value, index))
        else:
            for item in value:
                yield from self._flatten(item)

    def _fetch(self, tensor: DeviceTensor) -> np.ndarray:
        if self._closed:
            raise UsageError("the session of this tensor is closed", "copy it with .numpy() before closing")
        with self._talking():
            return tensor._tensor.numpy()

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Bound the time and give errors their meaning."""
        limit = contextlib.nullcontext() if self._connection is None else self._connection.limit(self.timeout_s)
        try:
            with limit:
                yield
        except CrossloomError:
            raise
        except Exception as err:
            if self._connection is not None:
                raise self._connection.failure(err) from err
            lines = str(err).strip().splitlines() or [type(err).__name__]
            raise InternalError(f"the compiled model failed: {lines[-1]}") from err
