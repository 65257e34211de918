"""Build the embed, prefill and decode functions of a Llama-family decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx
from tvm.relax import op


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions of a decoder.

    Attributes
    ----------
    layers, dim, ffn_dim, heads, kv_heads, head_dim, vocab, context : int
    eps : float
        Of RMSNorm.
    inverse_frequency : numpy.ndarray
        Radians a position, float32, one for each rotated pair.
    interleaved : bool
        Rotated pairs are ``(2i, 2i+1)``, else ``(i, i + n/2)`` over the first ``n`` values of a head.
    """

    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    inverse_frequency: np.ndarray
    interleaved: bool


class DecoderBuilder:
    """Emit one entry function into a BlockBuilder; weights become parameters when first used.

    Parameters
    ----------
    config : DecoderConfig
    shapes : dict of str to tuple of int
        Every weight of the file, by GGUF name.
    """

    def __init__(self, config: DecoderConfig, shapes: dict[str, tuple[int, ...]]) -> None:
        self.config, self.shapes = config, shapes
        self.bb = relax.BlockBuilder()
        self.weights: dict[str, relax.Var] = {}

    def build(
        self, name: str, inputs: Sequence[tuple[str, tuple, str]]
    ) -> tuple[relax.Function, list[str], list[str], list[str]]:
        """Return function `name`, its inputs' names, its weights' names and its outputs' names."""
        self.weights = {}
        given = [relax.Var(key, relax.TensorType(shape, dtype)) for key, shape, dtype in inputs]
        body: Callable[..., list[relax.Expr]] = getattr(self, f"_{name}")
        # Parameters are known only when the body is; a block without a function collects it first.
        self.bb = relax.BlockBuilder()
        with self.bb.function(name, [*given, *self._used(name)]):
            with self.bb.dataflow():
                results = body(*given)
                out = self.bb.emit_output(results[0] if len(results) == 1 else relax.Tuple(results))
            self.bb.emit_func_output(out)
        outputs = ["inputs_embeds"] if name == "embed" else ["logits", "present_key", "present_value"]
        return self.bb.get()[name], [key for key, _, _ in inputs], list(self.weights), outputs

    def _used(self, name: str) -> list[relax.Var]:
        """Declare the weights of an entry, in the file's order."""
        table = {"embed": ["token_embd.weight"]}.get(name)
        head = "output.weight" if "output.weight" in self.shapes else "token_embd.weight"
        for key, shape in self.shapes.items():
            if key == "rope_freqs.weight":
                continue
            wanted = key in table if table else key != "token_embd.weight" or name == "decode" or key == head
            if wanted:
                self.weights[key] = relax.Var(key.replace(".", "_"), relax.TensorType(shape, "float32"))
        return list(self.weights.values())

    def _linear(self, x: relax.Expr, name: str) -> relax.Expr:
        emit = self.bb.emit
        out = emit(op.matmul(x, emit(op.permute_dims(self.weights[f"{name}.weight"]))))
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else emit(op.add(out, bias))

    def _norm(self, x: relax.Expr, name: str) -> relax.Expr:
        return self.bb.emit(op.nn.rms_norm(x, self.weights[f"{name}.weight"], axes=-1, epsilon=self.config.eps))

    def _rotate(self, x: relax.Expr, cos: relax.Expr, sin: relax.Expr) -> relax.Expr:
        """Rotate ``(1, T, heads, head_dim)`` by tables ``(1, T, 1, n/2)``."""
        emit, c = self.bb.emit, self.config
        length, heads, pairs = x.ty.shape[1], x.ty.shape[2], len(c.inverse_frequency)
        rest = None
        if 2 * pairs < c.head_dim:
            both = emit(op.split(x, [2 * pairs], axis=-1))
            x, rest = emit(relax.TupleGetItem(both, 0)), emit(relax.TupleGetItem(both, 1))
        if c.interleaved:
            x = emit(op.reshape(x, (1, length, heads, pairs, 2)))
            cos, sin = (emit(op.expand_dims(table, axis=[-1])) for table in (cos, sin))
        halves = emit(op.split(x, 2, axis=-1))
        a, b = emit(relax.TupleGetItem(halves, 0)), emit(relax.TupleGetItem(halves, 1))
        first = emit(op.subtract(emit(op.multiply(a, cos)), emit(op.multiply(b, sin))))
        second = emit(op.add(emit(op.multiply(b, cos)), emit(op.multiply(a, sin))))
        out = emit(op.concat([first, second], axis=-1))
        if c.interleaved:
            out = emit(op.reshape(out, (1, length, heads, 2 * pairs)))
        return out if rest is None else emit(op.concat([out, rest], axis=-1))

    def _embed(self, ids: relax.Var) -> list[relax.Expr]:
        return [self._lookup(ids)]

    def _lookup(self, ids: relax.Expr) -> relax.Expr:
        flat = self.bb.emit(op.reshape(ids, (ids.ty.shape[1],)))
        rows = self.bb.emit(op.take(self.weights["token_embd.weight"], flat, axis=0, mode="clip"))
        return self.bb.emit(op.reshape(rows, (1, ids.ty.shape[1], self.config.dim)))

    def _prefill(self, x: relax.Var, mask: relax.Var, positions: relax.Var) -> list[relax.Expr]:
        return self._stack(x, mask, positions, None)

    def _decode(
        self, ids: relax.Var, mask: relax.Var, positions: relax.Var, key: relax.Var, value: relax.Var
    ) -> list[relax.Expr]:
        return self._stack(self._lookup(ids), mask, positions, (key, value))

    def _layer_of(self, cache: relax.Var, layer: int) -> relax.Expr:
        sliced = self.bb.emit(op.strided_slice(cache, [0], [layer], [layer + 1]))
        return self.bb.emit(op.squeeze(sliced, axis=[0]))

    def _stack(
        self, x: relax.Expr, mask: relax.Expr, positions: relax.Expr, past: tuple[relax.Var, relax.Var] | None
    ) -> list[relax.Expr]:
        emit, c = self.bb.emit, self.config
        length = x.ty.shape[1]
        table = relax.const(c.inverse_frequency.reshape(1, 1, 1, -1).astype("float32"))
        angle = emit(op.expand_dims(emit(op.astype(positions, "float32")), axis=[2, 3]))
        angle = emit(op.multiply(angle, table))
        cos, sin = emit(op.cos(angle)), emit(op.sin(angle))
        scale = relax.const(1.0 / float(np.sqrt(c.head_dim)), "float32")
        keys, values = [], []
        for layer in range(c.layers):
            name = f"blk.{layer}"
            h = self._norm(x, f"{name}.attn_norm")
            split = {}
            for part, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
                y = emit(op.reshape(self._linear(h, f"{name}.attn_{part}"), (1, length, heads, c.head_dim)))
                if f"{name}.attn_{part}_norm.weight" in self.weights:
                    y = self._norm(y, f"{name}.attn_{part}_norm")
                if part != "v":
                    y = self._rotate(y, cos, sin)
                split[part] = emit(op.permute_dims(y, [0, 2, 1, 3]))
            q, k, v = split["q"], split["k"], split["v"]
            if past is not None:
                k = emit(op.concat([self._layer_of(past[0], layer), k], axis=2))
                v = emit(op.concat([self._layer_of(past[1], layer), v], axis=2))
            keys.append(emit(op.expand_dims(k, axis=[0])))
            values.append(emit(op.expand_dims(v, axis=[0])))
            if c.kv_heads != c.heads:
                k, v = (emit(op.repeat(t, c.heads // c.kv_heads, axis=1)) for t in (k, v))
            scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
            scores = emit(op.add(emit(op.multiply(scores, scale)), mask))
            mixed = emit(op.matmul(emit(op.nn.softmax(scores, axis=-1)), v))
            mixed = emit(op.permute_dims(mixed, [0, 2, 1, 3]))
            mixed = emit(op.reshape(mixed, (1, length, c.heads * c.head_dim)))
            x = emit(op.add(x, self._linear(mixed, f"{name}.attn_output")))
            h = self._norm(x, f"{name}.ffn_norm")
            gate = emit(op.nn.silu(self._linear(h, f"{name}.ffn_gate")))
            gated = emit(op.multiply(gate, self._linear(h, f"{name}.ffn_up")))
            x = emit(op.add(x, self._linear(gated, f"{name}.ffn_down")))
        if not (isinstance(length, tirx.IntImm) and int(length.value) == 1):
            x = emit(op.strided_slice(x, [1], [length - 1], [length], assume_inbound=True))
        head = "output" if "output.weight" in self.weights else "token_embd"
        logits = self._linear(self._norm(x, "output_norm"), head)
        if c.layers == 1:
            return [logits, keys[0], values[0]]
        return [logits, emit(op.concat(keys, axis=0)), emit(op.concat(values, axis=0))]
