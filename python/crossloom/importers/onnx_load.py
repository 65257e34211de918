"""Read an ONNX model and its tensors: bytes or a file, with external data confined to the model's folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import TensorProto

from crossloom.errors import UnsupportedModel, UsageError

#: Element types that a weight may have.  The 4-bit ones are widened to one byte per value when read.
WEIGHT_TYPES: dict[int, np.dtype] = {
    t: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(t))
    for t in (
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.DOUBLE,
        TensorProto.BFLOAT16,
        TensorProto.INT8,
        TensorProto.UINT8,
        TensorProto.INT16,
        TensorProto.UINT16,
        TensorProto.INT32,
        TensorProto.UINT32,
        TensorProto.INT64,
        TensorProto.UINT64,
        TensorProto.BOOL,
        TensorProto.INT4,
        TensorProto.UINT4,
    )
}
WIDENED = {TensorProto.INT4: np.dtype("int8"), TensorProto.UINT4: np.dtype("uint8")}
#: A product of dimensions beyond this overflows int64 arithmetic on byte offsets somewhere downstream.
MAX_ELEMENTS = 1 << 48


def load(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    """Parse a model without reading its external data.

    Parameters
    ----------
    source : str, path, bytes or onnx.ModelProto
        A file name, a serialised model, or a parsed one (copied, never changed).

    Returns
    -------
    model : onnx.ModelProto
        A private copy.
    folder : pathlib.Path or None
        Where external data lies; None when the model did not come from a file.

    Raises
    ------
    UnsupportedModel
        The bytes are not an ONNX model.
    UsageError
        The file is missing or cannot be read.
    """
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
        return model, None
    folder: Path | None = None
    if isinstance(source, bytes | bytearray | memoryview):
        data, what = bytes(source), "the given bytes"
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        what = f"'{path}'"
        try:
            data = path.read_bytes()
        except OSError as err:
            raise UsageError(
                f"cannot read model {what}: {err.strerror or err}", "give the path of an ONNX file"
            ) from err
        folder = path.parent
    else:
        raise UsageError(
            f"cannot import a model from {type(source).__name__}", "give a path, bytes or an onnx.ModelProto"
        )
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, ValueError, RuntimeError) as err:
        raise UnsupportedModel(
            f"{what}: not an ONNX model ({err})", "the file is truncated or is not ONNX; export it again"
        ) from err
    if not model.HasField("graph"):
        raise UnsupportedModel(f"{what}: holds no graph ({len(data)} bytes)", "export the model again")
    return model, folder


def checked_dims(dims: list[int], what: str) -> tuple[int, ...]:
    """Return dims as a tuple; negative or absurdly large ones raise :class:`UnsupportedModel`."""
    total = 1
    for dim in dims:
        if dim < 0:
            raise UnsupportedModel(f"{what}: negative dimension in shape {list(dims)}", "correct the shape")
        total *= max(dim, 1)
    if total > MAX_ELEMENTS:
        raise UnsupportedModel(f"{what}: shape {list(dims)} has too many elements", "correct the shape")
    return tuple(dims)


def read_tensor(tensor: TensorProto, folder: Path | None) -> np.ndarray:
    """Return the values of one tensor.

    Parameters
    ----------
    tensor : onnx.TensorProto
    folder : pathlib.Path or None
        Folder that external data must lie in.

    Returns
    -------
    numpy.ndarray
        Shape ``tensor.dims``.  INT4 comes as int8 and UINT4 as uint8, one value per byte.

    Raises
    ------
    UnsupportedModel
        Unknown element type, data that do not fit the shape, NaN values, or external data that are missing,
        short or outside the folder.
    """
    name = f"tensor '{tensor.name}'"
    if tensor.data_type not in WEIGHT_TYPES:
        raise UnsupportedModel(
            f"{name}: element type {type_name(tensor.data_type)} is not supported",
            "cast it to float32, float16, an integer type or bool before exporting",
        )
    dims = checked_dims(list(tensor.dims), name)
    dtype = WEIGHT_TYPES[tensor.data_type]
    count = int(np.prod(dims, dtype=np.int64)) if dims else 1
    four_bit = tensor.data_type in WIDENED
    size_bytes = -(-count // 2) if four_bit else count * dtype.itemsize
    if tensor.data_location == TensorProto.EXTERNAL:
        tensor = _with_external_bytes(tensor, folder, size_bytes)
    if tensor.HasField("raw_data") and len(tensor.raw_data) != size_bytes:
        raise UnsupportedModel(
            f"{name}: shape {list(dims)} needs {size_bytes} bytes, found {len(tensor.raw_data)}",
            "the model is truncated; export it again",
        )
    if tensor.HasField("segment"):
        raise UnsupportedModel(f"{name}: is stored in segments", "save the model with current onnx")
    # to_array allocates from the shape before it looks at the data: compare the counts first.
    if not tensor.HasField("raw_data"):
        stored = max(len(getattr(tensor, f)) for f in _DATA_FIELDS)
        if stored * 8 < count:
            raise UnsupportedModel(
                f"{name}: shape {list(dims)} needs {count} values, found {stored}", "export the model again"
            )
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, RuntimeError, OverflowError, IndexError, KeyError) as err:
        raise UnsupportedModel(
            f"{name}: its data do not fit shape {list(dims)} ({err})", "export the model again"
        ) from err
    if four_bit:
        array = array.astype(WIDENED[tensor.data_type])
    if tuple(array.shape) != dims:
        raise UnsupportedModel(
            f"{name}: shape {list(dims)} does not fit its {array.size} values", "export the model again"
        )
    if has_nan(array):
        raise UnsupportedModel(f"{name}: holds NaN", "the weights are damaged; export the model again")
    return np.array(array, order="C").reshape(dims)


_DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def has_nan(array: np.ndarray) -> bool:
    """Tell whether a floating-point array (bfloat16 included) holds a NaN; infinities are legal in masks."""
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        return False
    return bool(np.isnan(array).any())


def type_name(elem_type: int) -> str:
    """Name of an ONNX element type, or its number when there is none."""
    try:
        return str(TensorProto.DataType.Name(elem_type))
    except ValueError:
        return str(elem_type)


def _with_external_bytes(tensor: TensorProto, folder: Path | None, size_bytes: int) -> TensorProto:
    """Return a copy of the tensor that holds its bytes."""
    name = f"tensor '{tensor.name}'"
    info = {entry.key: entry.value for entry in tensor.external_data}
    location = info.get("location", "")
    if folder is None:
        raise UnsupportedModel(
            f"{name}: its data are in the file '{location}', but the model was not given as a path",
            "import the model from its path, or load the external data first",
        )
    path = _confined(location, folder, name)
    try:
        offset = int(info.get("offset", 0))
        length = int(info.get("length", size_bytes))
    except ValueError as err:
        raise UnsupportedModel(
            f"{name}: offset or length of its external data is not a number ({err})", "export the model again"
        ) from err
    if offset < 0 or length != size_bytes:
        raise UnsupportedModel(
            f"{name}: shape {list(tensor.dims)} needs {size_bytes} bytes, "
            f"the external data entry says offset {offset}, length {length}",
            "export the model again",
        )
    try:
        available = path.stat().st_size
        if offset + length > available:
            raise UnsupportedModel(
                f"{name}: needs bytes {offset}..{offset + length} of '{location}', which ends at {available}",
                "the data file is truncated; copy it again",
            )
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
    except OSError as err:
        raise UnsupportedModel(
            f"{name}: cannot read its external data '{location}': {err.strerror or err}",
            "place the data file beside the model",
        ) from err
    inline = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    inline.raw_data = data
    return inline


def _confined(location: str, folder: Path, name: str) -> Path:
    """Return the path of an external file, refusing every way out of the model's folder."""
    lexical = (PurePosixPath(location), PureWindowsPath(location))
    if (
        not location
        or "\0" in location
        or any(p.is_absolute() or p.drive or ".." in p.parts for p in lexical)
        or location.startswith(("/", "\\"))
    ):
        raise UnsupportedModel(
            f"{name}: external data location '{location}' leaves the model's folder",
            "keep the data file beside the model and refer to it by a relative path without '..'",
        )
    path = folder / location
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as err:
        raise UnsupportedModel(
            f"{name}: its external data file '{location}' is missing", "place the data file beside the model"
        ) from err
    if not real.is_relative_to(folder.resolve()):
        raise UnsupportedModel(
            f"{name}: external data '{location}' is a link out of the model's folder",
            "copy the data file beside the model",
        )
    if not real.is_file():
        raise UnsupportedModel(
            f"{name}: external data '{location}' is not a file", "place the data file beside the model"
        )
    return real
