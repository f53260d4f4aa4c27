"""Lists the steps of `make bench-gpu`: each step is a command of another bench, with the files that it must
leave behind. The command calls this module.
"""

import importlib.util
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests import engine_env
from tests.vllm_env import environment

_ENGINE, _TIERS, _GATEWAY = "bench.model_server.engine", "bench.tiers", "bench.gpu.gateway"
NEEDED = ("torch", "transformers", "xxhash")
"""The packages that the steps of the engine import, besides what these packages need themselves."""
RECORDED = ("--prefixes", "4", "--recorded", "12")
_CARRIED = Path("build/tiers-patterns")


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    rows: str
    """The rows of the documents that this step measures."""
    module: str
    arguments: Sequence[str]
    planned_s: float
    """The expected time of the step. This is an estimate until the step has run on such a device."""
    timeout_s: float
    missing: str = ""
    """The reason why the step cannot run here. It is empty if the step can run."""
    engine_environment: bool = False
    """True if the step runs in the Python of `make engine-env`, which has torch. Otherwise it runs in the
    Python of this process.
    """

    def command(self, python: str, figures: Path) -> list[str]:
        within = ("tests.environments", "engine", "run") if self.engine_environment else ()
        return [python, "-m", *within, self.module, *self.arguments, "--json", str(figures)]


def on_gpu(device: str) -> list[Step]:
    """Return the steps for one data-centre GPU. Without the last two, which need vLLM, they take at most 450
    s.
    """
    large = ("--shape", "8b", "--device", device)
    small = ("--shape", "gpt2", "--device", device)
    cell = ("--ratios", "0.25", "--tiers", "1+2", "5+10", "--prefix-tokens", "512")
    opt = ("--device", device, "--disk", "direct", *cell, *RECORDED, "--warm-up", "8", "--requests", "10")
    return [
        _engine("step times, 8B", "step-times", arguments=large, planned_s=25, timeout_s=150),
        _engine("001-6, 8B", "001-6", arguments=large, repeats=3, planned_s=50, timeout_s=150),
        _engine("001-8, 8B", "001-8", arguments=large, repeats=3, planned_s=30, timeout_s=120),
        _engine("003-5, GPT-2 size", "003-5", arguments=small, repeats=2, planned_s=40, timeout_s=150),
        _engine("001-7, 8B", "001-7", arguments=large, planned_s=100, timeout_s=400),
        _tiers("OPT-30B", ("--shape", "opt-30b", *opt), planned_s=190, timeout_s=400, missing=_no_patterns()),
        _gateway("talks", device="cuda", seconds=25, planned_s=220, timeout_s=400),
        _gateway("llm-d", device="cuda", seconds=40, planned_s=220, timeout_s=400),
    ]


def preparation() -> list[str]:
    """Return the command that records the patterns which the tiers' step needs. It takes SmolLM2."""
    words = "tests.environments engine run bench.tiers --carry --prefix-tokens 512"
    return [*words.split(), *RECORDED]


def lacking_packages() -> list[str]:
    """Return the packages that the steps need and that this Python does not have."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def tiny() -> list[Step]:
    """Return the same rows on the CPU, as small as possible. They show only that the rows run. The engine's
    rows share one process, because its imports take longer than the rows.
    """
    shape = ("--shape", "tiny")
    cell = ("--ratios", "0.25", "--tiers", "5+10", "--prefix-tokens", "64")
    asked = ("--prefixes", "1", "--recorded", "4", "--warm-up", "2", "--requests", "2")
    tiers = (*shape, "--disk", "direct", "--real-compute", *cell, *asked)
    rows = ("step-times", "001-6", "001-8", "003-5", "001-7")
    found = [
        _engine("engine, tiny", *rows, arguments=(*shape, "--requests", "4"), planned_s=30, timeout_s=300),
        _tiers("tiny", tiers, planned_s=30, timeout_s=600),
    ]
    lacking = "" if engine_env.locate().ready else "torch is not installed: run `make engine-env`"
    return [
        *(replace(step, engine_environment=True, missing=lacking) for step in found),
        _gateway("talks", device="cpu", seconds=3, planned_s=120, timeout_s=600),
        _gateway("llm-d", device="cpu", seconds=3, planned_s=60, timeout_s=600),
    ]


def _engine(
    name: str, *rows: str, arguments: Sequence[str], repeats: int = 1, planned_s: float, timeout_s: float
) -> Step:
    """Return a step that keeps each repeat, so that the next run makes only those that are missing."""
    count = ("--repeats", str(repeats), "--up-to", str(repeats))
    return Step(name, " ".join(rows), _ENGINE, (*arguments, *count, "--rows", *rows), planned_s, timeout_s)


def _tiers(
    shape: str, arguments: Sequence[str], *, planned_s: float, timeout_s: float, missing: str = ""
) -> Step:
    return Step(f"002-5, {shape}", "002-5", _TIERS, arguments, planned_s, timeout_s, missing)


def _no_patterns() -> str:
    """Return the reason why this machine cannot take the requests' patterns from anywhere."""
    if any(_CARRIED.glob("*/patterns.pt")):
        return ""
    return (
        f"{_CARRIED} is not here: run `python3 -m bench.gpu --prepare` where pip works, and carry that folder"
    )


def _gateway(load: str, *, device: str, seconds: float, planned_s: float, timeout_s: float) -> Step:
    """Return a step with real vLLM servers behind the gateway."""
    arguments = ("--load", load, "--device", device, "--seconds", str(seconds))
    name = {"talks": "two vLLM servers behind the gateway", "llm-d": "llm-d's baseline, one vLLM server"}[
        load
    ]
    return Step(name, "", _GATEWAY, arguments, planned_s, timeout_s, missing=_lacking(load, device))


def _lacking(load: str, device: str) -> str:
    """Return the reason why a gateway's step cannot run under this Python. It is empty if the step can
    run.
    """
    envoy = Path(sysconfig.get_path("scripts")) / "envoy"
    if not envoy.exists():
        return f"Envoy is not installed beside this Python ({envoy}): install this project's packages there with pip"
    if device == "cpu" and not environment.locate().ready:
        return f"vLLM for the CPU is not built: {environment.BUILD_COMMAND}"
    if device != "cpu" and not all(map(importlib.util.find_spec, ("torch", "vllm"))):
        return "vLLM with CUDA is not installed in this Python"
    if device != "cpu" and load == "llm-d" and _gpu_bytes(device) < 120e9:
        return "weights and cache of Qwen3-32B's shape take 115 GB of the GPU"
    return ""


def _gpu_bytes(device: str) -> int:
    import torch  # noqa: PLC0415 - not every Python that runs the tiny steps has it

    return int(torch.cuda.get_device_properties(device).total_memory)
