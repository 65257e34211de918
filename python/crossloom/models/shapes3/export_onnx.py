"""Write the six ONNX graphs of shapes3 beside its weight file.

``python -m crossloom.models.shapes3.export_onnx``

torch.onnx writes each graph; then every parameter initializer is replaced by
an fp16 external tensor that points into ``shapes3.safetensors`` (a safetensors
file is raw bytes at known offsets) and a Cast to float32. So the graphs hold
no weights, the tied embedding is stored once for three of them, and a new
training needs no new export.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.export import Dim

from .config import CONFIG
from .network import Shapes3
from .weights import FILE, byte_ranges, path, weights

OPSET = 18


class _Vision(nn.Module):
    def __init__(self, whole: Shapes3) -> None:
        super().__init__()
        self.vision = whole.vision

    def forward(self, image: Tensor) -> Tensor:
        return self.vision(image)


class _Projector(nn.Module):
    def __init__(self, whole: Shapes3) -> None:
        super().__init__()
        self.projector = whole.projector

    def forward(self, vision_hidden: Tensor) -> Tensor:
        return self.projector(vision_hidden)


class _Audio(nn.Module):
    def __init__(self, whole: Shapes3) -> None:
        super().__init__()
        self.audio = whole.audio

    def forward(self, log_mel: Tensor) -> Tensor:
        return self.audio(log_mel)


class _Embed(nn.Module):
    def __init__(self, whole: Shapes3) -> None:
        super().__init__()
        self.model = whole.model

    def forward(self, vision_features: Tensor, audio_features: Tensor, input_ids: Tensor) -> Tensor:
        text = self.model.embed_tokens(input_ids)
        return torch.cat((vision_features, audio_features, text), dim=1)


class _Prefill(nn.Module):
    def __init__(self, whole: Shapes3) -> None:
        super().__init__()
        self.model = whole.model

    def forward(
        self, inputs_embeds: Tensor, attention_mask: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, key, value = self.model(inputs_embeds, attention_mask, position_ids)
        return self.model.logits(hidden[:, -1:, :]), key, value


class _Decode(nn.Module):
    def __init__(self, whole: Shapes3) -> None:
        super().__init__()
        self.model = whole.model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key: Tensor,
        past_value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, key, value = self.model(
            self.model.embed_tokens(input_ids), attention_mask, position_ids, past_key, past_value
        )
        return self.model.logits(hidden), key, value


def _parts(whole: Shapes3) -> dict[str, tuple[nn.Module, dict[str, Tensor], Any, list[str]]]:
    """Module, example inputs, dynamic shapes and output names of each part."""
    c = CONFIG
    nv, na, n = Dim("nv", max=c.vision_tokens * 4), Dim("na", min=0, max=c.audio_tokens * 4), Dim("n", max=64)
    t, p = Dim("T", max=160), Dim("P", max=192)
    cache = torch.zeros(c.layers, 1, c.kv_heads, 7, c.head_dim)
    decoder_out = ["logits", "present_key", "present_value"]
    return {
        "vision": (
            _Vision(whole),
            {"image": torch.zeros(1, c.channels, c.image_size, c.image_size)},
            None,
            ["vision_hidden"],
        ),
        "projector": (
            _Projector(whole),
            {"vision_hidden": torch.zeros(1, c.vision_tokens, c.vision_dim)},
            None,
            ["vision_features"],
        ),
        "audio": (
            _Audio(whole),
            {"log_mel": torch.zeros(1, c.n_mels, c.frames)},
            None,
            ["audio_features"],
        ),
        "embed": (
            _Embed(whole),
            {
                "vision_features": torch.zeros(1, 5, c.dim),
                "audio_features": torch.zeros(1, 7, c.dim),
                "input_ids": torch.zeros(1, 3, dtype=torch.long),
            },
            {"vision_features": {1: nv}, "audio_features": {1: na}, "input_ids": {1: n}},
            ["inputs_embeds"],
        ),
        "prefill": (
            _Prefill(whole),
            {
                "inputs_embeds": torch.zeros(1, 7, c.dim),
                "attention_mask": torch.zeros(1, 1, 7, 7),
                "position_ids": torch.arange(7)[None],
            },
            {"inputs_embeds": {1: t}, "attention_mask": {2: t, 3: t}, "position_ids": {1: t}},
            decoder_out,
        ),
        "decode": (
            _Decode(whole),
            {
                "input_ids": torch.zeros(1, 1, dtype=torch.long),
                "attention_mask": torch.zeros(1, 1, 1, 8),
                "position_ids": torch.full((1, 1), 7),
                "past_key": cache,
                "past_value": cache.clone(),
            },
            {
                "input_ids": None,
                "attention_mask": {3: p + 1},
                "position_ids": None,
                "past_key": {3: p},
                "past_value": {3: p},
            },
            decoder_out,
        ),
    }


def _reference_weights(
    graph: onnx.GraphProto, params: dict[str, np.ndarray], ranges: dict[str, tuple[int, int]]
) -> None:
    """Replace parameter initializers by external fp16 tensors and Casts.

    The exporter folds the transpose of a Linear's matrix into a constant; such
    a constant becomes the stored matrix, Cast, Transpose again.
    """
    transposed = {value.T.tobytes(): name for name, value in params.items() if value.ndim == 2}
    kept, before = [], []
    used: set[str] = set()
    for tensor in graph.initializer:
        value = numpy_helper.to_array(tensor)
        if tensor.name in params:
            name, flip = tensor.name, False
        elif value.ndim == 2 and value.tobytes() in transposed:
            name, flip = transposed[value.tobytes()], True
        else:
            kept.append(tensor)
            continue
        expected = params[name].T if flip else params[name]
        if not np.array_equal(value, expected):
            raise ValueError(f"{name}: the exported constant is not the stored tensor")
        if name not in used:
            used.add(name)
            kept.append(_external(name, params[name].shape, *ranges[name]))
            cast = helper.make_node("Cast", [f"{name}.fp16"], [name], f"widen.{name}", to=TensorProto.FLOAT)
            before.append(cast)
        if flip:
            node = helper.make_node("Transpose", [name], [tensor.name], f"turn.{name}", perm=[1, 0])
            before.append(node)
    nodes = [*before, *graph.node]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)


def _external(name: str, shape: tuple[int, ...], offset: int, length: int) -> TensorProto:
    """fp16 initializer ``<name>.fp16`` whose bytes lie in the weight file."""
    tensor = TensorProto(
        name=f"{name}.fp16",
        dims=shape,
        data_type=TensorProto.FLOAT16,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (("location", FILE), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _strip(model: onnx.ModelProto) -> None:
    """Drop what the exporter says about this machine and its source files."""
    model.doc_string = ""
    del model.metadata_props[:]
    graph = model.graph
    graph.doc_string = ""
    del graph.metadata_props[:], graph.value_info[:]
    for item in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        item.doc_string = ""
        del item.metadata_props[:]
    for function in model.functions:
        raise ValueError(f"unexpected local function {function.name}")


def export(folder: Path) -> list[Path]:
    """Write ``<part>.onnx`` for every part into `folder`.

    `folder` must already hold the weight file the graphs point into.
    """
    params, ranges = weights(folder / FILE), byte_ranges(folder / FILE)
    whole = Shapes3(CONFIG)
    whole.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    whole.eval()
    files = []
    for part, (module, inputs, dynamic, outputs) in _parts(whole).items():
        program = torch.onnx.export(
            module.eval(),
            kwargs=inputs,
            dynamic_shapes=dynamic,
            input_names=list(inputs),
            output_names=outputs,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
        if program is None:
            raise RuntimeError(f"torch.onnx wrote nothing for {part}")
        model = program.model_proto
        _reference_weights(model.graph, params, ranges)
        _strip(model)
        model.graph.name = f"shapes3.{part}"
        inline = sum(numpy_helper.to_array(t).nbytes for t in model.graph.initializer if not t.external_data)
        if inline > 65536:
            big = [(t.name, tuple(t.dims)) for t in model.graph.initializer if not t.external_data]
            raise ValueError(f"{part}: {inline} bytes of constants stay inline: {big}")
        file = folder / f"{part}.onnx"
        file.write_bytes(model.SerializeToString(deterministic=True))
        onnx.checker.check_model(file, full_check=True)
        files.append(file)
        print(f"{file.name}: {len(model.graph.node)} nodes, {file.stat().st_size} bytes, {inline} inline")
    return files


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=path(), help="where the weight file is")
    export(parser.parse_args().folder)


if __name__ == "__main__":
    main()
