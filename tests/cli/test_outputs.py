"""Where a bundle may be written: refused before the long work, and nothing of the user's is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from crossloom import driver


@pytest.fixture
def no_compilation(monkeypatch) -> None:
    """Refusals come before the long work."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was compiled")

    monkeypatch.setattr(driver, "compile_model", refuse)


@pytest.mark.parametrize("form", ["tar", "dir"])
def test_the_model_is_never_overwritten(tvmc, model, tmp_path, no_compilation, form):
    path, link = Path(shutil.copy(model, tmp_path / "m.onnx")), tmp_path / "link"
    link.symlink_to(path)
    for output in (path, link):
        code, _, err = tvmc("compile", path, "--target", "host", "-o", output, "--output-format", form)
        assert code == 2 and "is the model itself" in err
        assert path.read_bytes() == model.read_bytes()


def test_other_files_are_not_overwritten(tvmc, model, tmp_path, no_compilation):
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "thesis.txt").write_text("years of work")
    for output, form in ((tmp_path, "dir"), (tmp_path / "thesis.txt", "tar")):
        code, _, err = tvmc("compile", model, "--target", "host", "-o", output, "--output-format", form)
        assert code == 2 and "left alone" in err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert len(list(tmp_path.iterdir())) == 2
