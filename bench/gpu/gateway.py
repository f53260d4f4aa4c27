"""Measures two real vLLM servers behind the gateway, by two rules: `python -m bench.gpu.gateway`, a step of
`make bench-gpu`.

On a GPU both servers share the device. Their model has the shape of an 8B Llama with random weights, which
vLLM makes itself, and 64 users hold conversations whose turns are four times as long as those of
`bench-live`. `--device cpu` runs a small version on the tiny model of the tests. The bench prints the same
table as `make bench-live`; docs/bench-live.md says how to read it. One Python needs
Envoy, this project's packages and vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from bench.model_server.engine.shapes import SHAPES
from bench.routing.live import vllm, vllm_fleet, vllm_report
from bench.routing.live.vllm_fleet import Setting
from bench.routing.live.vllm_report import VllmRun
from bench.tables import write_json
from epp.config.policy import RuleName
from model_server.core.scheduler import SchedulerLimits
from tests.harness.cached_builds import cache_folder
from tests.vllm_env import environment, tiny_model
from tests.vllm_env.environment import VllmEnvironment

RULES: Final[tuple[RuleName, ...]] = ("least-cost", "round-robin")
ON_GPU: Final = Setting(
    servers=2,
    cache_blocks=3072,
    limits=SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=8192),
    longest_tokens=16_384,
    users=64,
    scale=4.0,
    probe_tokens=4000,
    arguments=(
        *("--dtype", "bfloat16", "--load-format", "dummy"),
        *("--kv-cache-memory-bytes", str(14 << 30)),
    ),
    in_turn=True,
    variables=(("VLLM_CACHE_ROOT", str(cache_folder() / "vllm-scratch")),),
)
TINY: Final = Setting(servers=2, users=4, probe_tokens=64, hurry=6.0)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device of the servers (default %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="seconds of arrivals in a run (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="keep every figure in this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        try:
            runs = asyncio.run(_runs(args.device, seconds=args.seconds, folder=Path(scratch)))
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
    write_json(args.json, {"runs": msgspec.to_builtins(runs)})
    print(vllm_report.report(runs))
    return 1 if any(run.failures for run in runs) else 0


async def _runs(device: str, *, seconds: float, folder: Path) -> list[VllmRun]:
    task = asyncio.current_task()
    assert task is not None
    # `make bench-gpu` sends this signal to a step that takes too long. The cancelled task then ends its
    # servers, Envoy and the picker.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if device == "cpu":
        found, setting = environment.require(), TINY
        model = found.model_folder / tiny_model.MODEL
    else:
        model = large_model(folder / "model")
        found, setting = VllmEnvironment(Path(sys.prefix), folder), ON_GPU
    async with (
        vllm_fleet.running_vllm_fleet(setting, found, model=model, folder=folder) as servers,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as session,
    ):
        speed = await vllm_fleet.probe(setting, session, servers)
        return [
            await vllm.one_run(
                rule,
                setting=setting,
                seed=1,
                seconds=seconds,
                speed=speed,
                servers=servers,
                session=session,
                directory=_made(folder / rule),
            )
            for rule in RULES
        ]


def large_model(folder: Path) -> Path:
    """Write a Llama of 8 billion parameters without its weights: a configuration, and the tests'
    tokenizer. Return `folder`.
    """
    tiny_model.write_config(_made(folder))
    tiny_model.write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    shape = {name: size for name, size in SHAPES["8b"].items() if name != "vocab_size"}
    changed = {**config, **shape, "head_dim": 128, "max_position_embeddings": ON_GPU.longest_tokens}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
