"""Describes the demo's model servers as processes to start. They are this repository's, without a model or
with a small real one.

The made-up model is a cost model of an 8B model on a GPU, and runs on any laptop. A real model computes on
the CPU, with fewer servers, shorter prompts and one thread each, so that a run ends within some minutes on
two cores.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.demo.workload import MODEL, Shape
from tests import engine_env

ADAPTERS: Final = ("sql", "legal", "support", "code", "medical", "travel")
"""LoRA adapters that every made-up server has, at most two of them in one batch. `make load` uses them."""

_BLOCK_TOKENS: Final = 16
_READY_WITHIN_S: Final = 60.0
"""The first start after an installation compiles every package it imports."""
_REAL_READY_WITHIN_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    model: str
    """The name of the real model. Empty means that the model is made up."""
    python: Path
    flags: Sequence[str]
    num_blocks: int
    servers: int
    requests: int
    ready_within_s: float

    @property
    def cache_tokens(self) -> int:
        """Return the tokens that the cache of one server holds."""
        return self.num_blocks * _BLOCK_TOKENS

    def command(self, *, port_file: Path) -> list[str | Path]:
        """Return the command. The server takes any free port and writes it to a file, so no other program can
        take the port before the server does.
        """
        cache = ("--num-blocks", str(self.num_blocks), "--block-size", str(_BLOCK_TOKENS))
        where: list[str | Path] = ["--port", "0", "--port-file", port_file]
        return [self.python, "-m", "model_server", "serve", *where, *cache, *self.flags]

    def shape(self, *, servers: int, requests: int, serial: bool) -> Shape:
        """Return a workload of about this many requests, from enough users to keep this many servers busy."""
        if serial:
            return Shape.serial(servers=servers, requests=requests)
        return (Shape.for_real_model if self.model else Shape.of)(servers=servers, requests=requests)


def made_up() -> Serving:
    """Return servers with a made-up model. All costs are the server's defaults."""
    return Serving(
        model="",
        python=Path(sys.executable),
        flags=(
            *("--model", MODEL),
            *(flag for name in ADAPTERS for flag in ("--lora", name)),
            *("--max-loras", "2"),
            # With this interval there are a quarter of the events, since all processes share the cores.
            *("--stream-interval", "4"),
        ),
        num_blocks=2048,
        servers=4,
        requests=264,
        ready_within_s=_READY_WITHIN_S,
    )


def real(model: str) -> Serving:
    return Serving(
        model=model,
        python=_python_with_torch(),
        flags=(
            *("--runner", "hf", "--model", model, "--served-model-name", MODEL),
            *("--threads", "1", "--max-num-batched-tokens", "256"),
        ),
        num_blocks=112,
        servers=2,
        requests=24,
        ready_within_s=_REAL_READY_WITHIN_S,
    )


def _python_with_torch() -> Path:
    """Return this environment's Python if torch is installed there, else that of the tests."""
    if importlib.util.find_spec("torch") is not None:
        return Path(sys.executable)
    return engine_env.require().python
