"""Model descriptions and load_model: strict about keys and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossloom.errors import UsageError
from crossloom.importers.description import load_description
from crossloom.importers.load import load_model

GOOD = """
[parts.a]
file = "a.onnx"
[entries.main]
parts = ["a"]
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[parts", "not TOML"),
        ("", "parts is missing"),
        (GOOD + "[extra]\n", "extra is not a known key"),
        (GOOD.replace('"a.onnx"', "3"), "parts.a.file must be a str"),
        (GOOD.replace("a.onnx", "../a.onnx"), "parts.a.file leads outside"),
        (GOOD.replace("a.onnx", "/etc/passwd"), "parts.a.file leads outside"),
        (GOOD.replace("a.onnx", "b.onnx"), "does not exist"),
        (GOOD.replace("a.onnx", "m.toml"), "must be an .onnx or .gguf"),
        (GOOD.replace('["a"]', '["z"]'), "entries.main.parts names an unknown part 'z'"),
        (GOOD.replace('["a"]', "[1]"), "entries.main.parts must be a list of part names"),
        (GOOD + "upper_bounds = { n = -1 }\n", "entries.main.upper_bounds.n must be a size"),
        (GOOD + 'modality = "smell"\n', "entries.main.modality must be one of"),
    ],
)
def test_wrong_descriptions_name_key_and_file(tmp_path: Path, text: str, message: str):
    (tmp_path / "a.onnx").write_bytes(b"x")
    file = tmp_path / "m.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"m\.toml") as caught:
        load_description(file)
    assert message in str(caught.value)


def test_link_out_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "out.onnx").write_bytes(b"x")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.onnx").symlink_to(tmp_path / "out.onnx")
    (folder / "m.toml").write_text(GOOD)
    with pytest.raises(UsageError, match="leads outside"):
        load_description(folder / "m.toml")


def test_load_model_names_missing_and_unknown_files(tmp_path: Path):
    with pytest.raises(UsageError, match="no model file"):
        load_model(tmp_path / "none.onnx")
    other = tmp_path / "weights.pt"
    other.write_bytes(b"\x80\x02")
    with pytest.raises(UsageError, match="no known model format"):
        load_model(other)
    with pytest.raises(UsageError, match="'tflite'"):
        load_model(other, model_format="tflite")
