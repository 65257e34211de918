"""The reference model: its data, features, weights, graphs and accuracy."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from crossloom.models import shapes3
from crossloom.models.shapes3 import data, features, greedy, vocab
from crossloom.models.shapes3.reference import Reference, gelu
from crossloom.models.shapes3.weights import FILE, byte_ranges

PARTS = ("vision", "projector", "audio", "embed", "prefill", "decode")


@pytest.fixture(scope="module")
def text_samples() -> list[shapes3.Sample]:
    return shapes3.held_out(60, seed=1)


@pytest.fixture(scope="module")
def audio_samples() -> list[shapes3.Sample]:
    return shapes3.held_out(40, seed=1, audio=True)


# Tokens


def test_tokens_round_trip():
    assert len(vocab.TOKENS) == len(set(vocab.TOKENS)) == shapes3.CONFIG.vocab_size
    for text in (*data.QUESTIONS, *data.ANSWERS):
        ids = vocab.encode(text)
        assert vocab.UNK not in ids
        assert vocab.decode(ids) == text
        assert vocab.decode([*ids, vocab.EOS, *ids]) == text


def test_answers_fit_the_default_length_and_questions_the_clip():
    assert max(map(len, data.ANSWERS)) + 1 <= 16
    # 60 ms of silence, then at most 54 ms a character.
    slowest = 0.06 + 0.054 * max(map(len, data.QUESTIONS))
    assert slowest <= shapes3.CONFIG.audio_samples / shapes3.CONFIG.sample_rate


# Generator


def test_held_out_is_deterministic_and_a_prefix_of_a_longer_list():
    short = shapes3.held_out(5, seed=3, audio=True)
    long = shapes3.held_out(70, seed=3, audio=True)
    written = shapes3.held_out(70, seed=3)
    other = shapes3.held_out(5, seed=4, audio=True)
    for a, b in zip(short, long, strict=False):
        assert (a.question, a.answer, a.family) == (b.question, b.answer, b.family)
        np.testing.assert_array_equal(a.image, b.image)
        np.testing.assert_array_equal(a.log_mel, b.log_mel)
    for a, b in zip(long, written, strict=True):
        assert (a.question, a.answer) == (b.question, b.answer)
        np.testing.assert_array_equal(a.image, b.image)
    assert not any(np.array_equal(a.image, b.image) for a, b in zip(short, other, strict=True))


def test_train_and_held_out_scenes_share_no_composition():
    def compositions(held_out: bool) -> set[tuple[tuple[int, int], ...]]:
        scenes = data.draw_scenes(np.random.default_rng(0), 3000, held_out)
        return {
            tuple(sorted((int(k), int(c)) for k, c in zip(kinds, colors, strict=True) if k >= 0))
            for kinds, colors in zip(scenes.kind, scenes.color, strict=True)
        }

    train, held = compositions(False), compositions(True)
    assert len(train) > len(held) > 200
    assert not train & held
    # Every single shape is learnt somewhere, at least beside another.
    assert {pair for scene in train for pair in scene} >= {pair for scene in held for pair in scene}


def _answer_by_hand(scene: list[tuple[str, str, float, float]], question: str) -> str | None:
    """The answer to `question` about (colour, kind, x, y) rows, in plain words."""
    if match := re.fullmatch(r"color of the (\w+)\?", question):
        found = [color for color, kind, _, _ in scene if kind == match[1]]
        return found[0] if len(found) == 1 else None
    if match := re.fullmatch(r"shape that is (\w+)\?", question):
        found = [kind for color, kind, _, _ in scene if color == match[1]]
        return found[0] if len(found) == 1 else None
    if match := re.fullmatch(r"how many (\w+)\?", question):
        singular = {"circles": "circle", "squares": "square", "triangles": "triangle", "crosses": "cross"}
        found = [kind for _, kind, _, _ in scene if match[1] == "shapes" or kind == singular[match[1]]]
        return ("zero", "one", "two", "three")[len(found)]
    if match := re.fullmatch(r"any (\w+) (\w+)\?", question):
        return "yes" if match.groups() in [(color, kind) for color, kind, _, _ in scene] else "no"
    match = re.fullmatch(r"(left of|right of|above|below) the (\w+)\?", question)
    assert match is not None, question
    anchors = [row for row in scene if row[1] == match[2]]
    if len(anchors) != 1:
        return None
    found = []
    for row in scene:
        if row is anchors[0]:
            continue
        right, down = row[2] - anchors[0][2], row[3] - anchors[0][3]
        ahead = {"left of": -right, "right of": right, "above": -down, "below": down}[match[1]]
        if abs(ahead) < 4.0:
            return None
        if ahead > 0:
            found.append(f"{row[0]} {row[1]}")
    return None if len(found) > 1 else (found or ["nothing"])[0]


def test_answers_are_those_of_a_second_implementation():
    scenes = data.draw_scenes(np.random.default_rng(5), 200, held_out=False)
    table = data.answer_table(scenes)
    for index in range(200):
        scene = [
            (data.COLORS[scenes.color[index, slot]], data.KINDS[scenes.kind[index, slot]], *center)
            for slot, center in enumerate(scenes.center[index])
            if scenes.kind[index, slot] >= 0
        ]
        for number, question in enumerate(data.QUESTIONS):
            answer = table[index, number]
            expected = _answer_by_hand(scene, question)
            assert (None if answer < 0 else data.ANSWERS[answer]) == expected, (scene, question)


def test_speech_has_the_two_tones_of_its_character():
    audio, labels = data.synthesize(np.random.default_rng(0), ["eeeeeeeeeeeeeeee"])
    assert audio.shape == (1, shapes3.CONFIG.audio_samples)
    code = int(vocab.encode("e")[0]) - len(vocab.SPECIALS)
    tones = sorted((data._LOW_HZ[code // 6], data._HIGH_HZ[code % 6]))
    spectrum = np.abs(np.fft.rfft(audio[0]))
    hz = np.fft.rfftfreq(audio.shape[1], 1 / shapes3.CONFIG.sample_rate)
    for tone in tones:
        near = np.abs(hz - tone) < 0.03 * tone
        assert spectrum[near].max() > 20 * np.median(spectrum)
    assert set(labels[0].tolist()) <= {vocab.PAD, int(vocab.encode("e")[0])}


# Features


def test_mel_scale_has_its_defining_points():
    # Slaney: 15 mel at 1 kHz, 27 more up to 6.4 kHz.
    np.testing.assert_allclose(features.hz_to_mel(np.array([0.0, 500.0, 1000.0, 6400.0])), [0, 7.5, 15, 42])
    hz = np.linspace(0.0, 8000.0, 201)
    np.testing.assert_allclose(features.mel_to_hz(features.hz_to_mel(hz)), hz, atol=1e-9)


def test_mel_filterbank_against_a_scalar_implementation():
    bank = features.mel_filterbank(40, 400, 16000)

    def to_hz(mel: float) -> float:
        return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)

    top = 15 + 27 * math.log(8) / math.log(6.4)
    for band in range(40):
        low, mid, high = (to_hz(top * (band + k) / 41) for k in range(3))
        for index in range(201):
            hz = index * 40.0
            if low < hz <= mid:
                height = (hz - low) / (mid - low)
            elif mid < hz < high:
                height = (high - hz) / (high - mid)
            else:
                height = 0.0
            assert bank[band, index] == pytest.approx(height * 2 / (high - low), abs=1e-8)


def test_mel_filterbank_has_whispers_published_values():
    """Entries of the 80-band bank that Whisper ships (librosa's default bank)."""
    bank = features.mel_filterbank(80, 400, 16000)
    for band, index, value in (
        (0, 1, 0.024862595),
        (1, 2, 0.022871772),
        (20, 20, 0.013890394),
        (40, 43, 0.014735566),
        (79, 192, 0.0031647119),
    ):
        assert bank[band, index] == pytest.approx(value, rel=1e-6)


def test_log_mel_of_a_tone_peaks_in_its_band_and_spans_eight_decades():
    time = np.arange(shapes3.CONFIG.audio_samples) / 16000
    clip = (0.5 * np.sin(2 * np.pi * 2000.0 * time)).astype(np.float32)[None]
    mel = features.log_mel(clip)
    assert mel.shape == (1, 40, 128) and mel.dtype == np.float32
    assert np.all(mel.max() - mel <= 2.0 + 1e-6)  # 8 decades, divided by 4
    bank = features.mel_filterbank()
    assert mel[0, :, 64].argmax() == bank[:, 2000 // 40].argmax()


# Reference


def test_gelu_is_exact():
    x = np.linspace(-10, 10, 4001)
    exact = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])
    np.testing.assert_allclose(gelu(x), exact, atol=1e-6)


def test_decoding_step_by_step_equals_one_prefill(text_samples):
    """The cache path and the full path give the same logits."""
    run = shapes3.reference.run
    rng = np.random.default_rng(0)
    ids = rng.integers(4, 32, (1, 9))
    empty = np.zeros((1, 0, shapes3.CONFIG.dim), dtype=np.float32)
    vision = run("vision", {"image": text_samples[0].image})[0]
    inputs = {"vision_features": vision, "audio_features": empty, "input_ids": ids}
    embeds = run("embed", inputs)[0]

    def prefill(length: int) -> list[np.ndarray]:
        return run(
            "prefill",
            {
                "inputs_embeds": embeds[:, :length],
                "attention_mask": greedy.causal_mask(length),
                "position_ids": np.arange(length)[None],
            },
        )

    total = embeds.shape[1]
    _, key, value = prefill(total - 3)
    for length in range(total - 2, total + 1):
        logits, key, value = run(
            "decode",
            {
                "input_ids": ids[:, length - 1 - 36 : length - 36],
                "attention_mask": np.zeros((1, 1, 1, length), dtype=np.float32),
                "position_ids": np.array([[length - 1]]),
                "past_key": key,
                "past_value": value,
            },
        )
    for ours, whole in zip((logits, key, value), prefill(total), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-4, atol=1e-4)


# Accuracy


def _least_right(number: int, accuracy: float, risk: float = 1e-3) -> int:
    """Right answers that a model of `accuracy` reaches but with probability `risk`."""
    below = 0.0
    for right in range(number + 1):
        below += math.comb(number, right) * accuracy**right * (1 - accuracy) ** (number - right)
        if below > risk:
            return right
    return number


def test_accuracy_on_written_questions(text_samples):
    right = round(shapes3.accuracy(shapes3.reference.run, text_samples) * len(text_samples))
    assert right >= _least_right(len(text_samples), 0.95)


def test_accuracy_on_spoken_questions(audio_samples):
    right = round(shapes3.accuracy(shapes3.reference.run, audio_samples) * len(audio_samples))
    assert right >= _least_right(len(audio_samples), 0.90)


def test_the_drawing_decides(text_samples):
    """Answers from the question alone are rarely right: the image is used."""
    shuffled = [
        shapes3.Sample(other.image, sample.question, sample.answer, sample.family)
        for sample, other in zip(text_samples, text_samples[1:] + text_samples[:1], strict=True)
    ]
    assert shapes3.accuracy(shapes3.reference.run, shuffled) < 0.7


# Files


def test_files_are_small_and_name_no_machine():
    folder = shapes3.path()
    assert (folder / FILE).stat().st_size <= 6_000_000
    graphs = [folder / f"{part}.onnx" for part in PARTS]
    assert sum(graph.stat().st_size for graph in graphs) < 1_000_000
    for graph in graphs:
        content = graph.read_bytes()
        for trace in (b"/home", b"/tmp", b"/root", b"/work", b"/usr", b".py", b"site-packages"):
            assert trace not in content, (graph.name, trace)


def test_weights_are_the_stored_half_precision_values():
    params, ranges = shapes3.weights(), byte_ranges()
    assert params.keys() == ranges.keys()
    raw = (shapes3.path() / FILE).read_bytes()
    for name, (offset, length) in ranges.items():
        stored = np.frombuffer(raw[offset : offset + length], dtype="<f2")
        np.testing.assert_array_equal(stored.astype(np.float32), params[name].ravel())
        assert np.isfinite(stored).all(), name


def test_import_does_not_load_torch():
    code = "import sys; from crossloom.models import shapes3; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_graphs_share_every_parameter_with_the_weight_file():
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    ranges, used = byte_ranges(), set()
    for part in PARTS:
        file = shapes3.path() / f"{part}.onnx"
        onnx.checker.check_model(file)
        graph = onnx.load(file, load_external_data=False).graph
        for tensor in graph.initializer:
            if not tensor.external_data:
                assert math.prod(tensor.dims) <= 64 * 128, (part, tensor.name)
                continue
            where = {entry.key: entry.value for entry in tensor.external_data}
            name = tensor.name.removesuffix(".fp16")
            assert tensor.data_type == onnx.TensorProto.FLOAT16
            assert where["location"] == FILE
            assert (int(where["offset"]), int(where["length"])) == ranges[name]
            used.add(name)
    assert used == set(ranges)


def test_description_names_the_graphs_and_their_dimensions():
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    description = tomllib.loads((shapes3.path() / "shapes3.toml").read_text())
    assert set(description["parts"]) == set(PARTS)
    assert set(description["entries"]) == {"vision", "audio", "embed", "prefill", "decode"}
    for entry in description["entries"].values():
        symbols = set()
        for part in entry["parts"]:
            file = shapes3.path() / description["parts"][part]["file"]
            for value in onnx.load(file, load_external_data=False).graph.input:
                symbols |= {dim.dim_param for dim in value.type.tensor_type.shape.dim if dim.dim_param}
        # "P + 1" is a size derived from P.
        assert {symbol.split(" ")[0] for symbol in symbols} == set(entry.get("upper_bounds", {}))


# ONNX Runtime


class _OnnxRuntime:
    """Executor of the entries on the shipped graphs."""

    def __init__(self, folder: Path) -> None:
        runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
        self.sessions = {
            part: runtime.InferenceSession(folder / f"{part}.onnx", providers=["CPUExecutionProvider"])
            for part in PARTS
        }

    def run(self, entry: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        outputs = self.sessions[entry].run(None, inputs)
        if entry == "vision":
            return self.sessions["projector"].run(None, {"vision_hidden": outputs[0]})
        return outputs


def test_onnx_runtime_equals_the_reference_on_every_part(text_samples, audio_samples):
    graphs, reference = _OnnxRuntime(shapes3.path()), Reference()
    seen = set()

    def both(entry: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        seen.add(entry)
        ours, theirs = reference.run(entry, inputs), graphs.run(entry, inputs)
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert np.abs(a - b).max() <= 1e-4 * np.abs(a).max(), entry
        return theirs

    for sample in (*text_samples[:6], *audio_samples[:6]):
        assert shapes3.generate(both, sample) == shapes3.generate(reference.run, sample)
    assert seen == {"vision", "audio", "embed", "prefill", "decode"}


def test_evaluate_command_prints_json():
    result = subprocess.run(
        [sys.executable, "-m", "crossloom.models.shapes3.evaluate", "--number", "4", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    numbers = json.loads(result.stdout)
    assert numbers["text"]["n"] == numbers["audio"]["n"] == 4
