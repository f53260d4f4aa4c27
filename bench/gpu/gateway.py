"""Measures real vLLM servers behind the gateway: `python -m bench.gpu.gateway`, steps of `make bench-gpu`.

`--load talks` compares two rules before two servers that share the GPU. Their model has the shape of an 8B
Llama, and 64 users hold conversations whose turns are four times as long as those of `bench-live`. `--load
llm-d` sends one server of Qwen3-32B's shape an eighth of llm-d's optimized baseline at 10 requests/s. vLLM
itself makes random weights. The vocabulary is small, and each word of a prompt is one token. `--device cpu`
runs small versions on the tiny model of the tests. The bench prints the same table as `make bench-live`;
docs/bench-live.md says how to read it. One Python needs Envoy, this project's packages and vLLM.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from dataclasses import replace
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
from tests.vllm_env import environment, prompts, tiny_model
from tests.vllm_env.environment import VllmEnvironment

TALKS: Final = Setting(
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
        # A server does not start if less of the GPU is free than this share, whatever the flag above says.
        *("--gpu-memory-utilization", "0.3"),
    ),
    in_turn=True,
    variables=(
        ("VLLM_CACHE_ROOT", str(cache_folder() / "vllm-scratch")),
        ("VLLM_USE_FLASHINFER_SAMPLER", "0"),  # it may have to be compiled first
    ),
)
LLM_D: Final = replace(TALKS, servers=1, cache_blocks=6144, scale=1.0, groups_per_s=10 / 8)
TINY: Final = Setting(servers=2, users=4, probe_tokens=64, hurry=6.0)
TINY_LLM_D: Final = replace(TINY, servers=1, scale=0.01, groups_per_s=2.0)
LOADS: Final[dict[str, tuple[str, Setting, Setting, tuple[RuleName, ...]]]] = {
    "talks": ("8b", TALKS, TINY, ("least-cost", "round-robin")),
    "llm-d": ("32b", LLM_D, TINY_LLM_D, ("least-cost",)),
}
"""The shape of the model, the settings on a GPU and on a CPU, and the rules of each load."""


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
        "--load", choices=list(LOADS), default="talks", help="what is measured (default %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="seconds of arrivals in a run (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="keep every figure in this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        try:
            runs = asyncio.run(_runs(args.device, args.load, seconds=args.seconds, folder=Path(scratch)))
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
    write_json(args.json, {"runs": msgspec.to_builtins(runs)})
    print(vllm_report.report(runs))
    return 1 if any(run.failures for run in runs) else 0


async def _runs(device: str, load: str, *, seconds: float, folder: Path) -> list[VllmRun]:
    task = asyncio.current_task()
    assert task is not None
    # `make bench-gpu` sends this signal to a step that takes too long. The cancelled task then ends its
    # servers, Envoy and the picker.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    shape, setting, tiny, rules = LOADS[load]
    if device == "cpu":
        found, setting = environment.require(), tiny
        model = found.model_folder / tiny_model.MODEL
    else:
        found, model = VllmEnvironment(Path(sys.prefix), folder), large_model(folder / "model", shape)
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
            for rule in rules
        ]


def large_model(folder: Path, shape: str) -> Path:
    """Write a Llama of one of `SHAPES` without its weights: a configuration, and the tests' tokenizer with
    one token for each word of the prompts. Return `folder`.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - only beside vLLM

    tiny_model.write_config(_made(folder))
    tiny_model.write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f" {word}" for word in prompts.WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    changed = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": TALKS.longest_tokens}
    (folder / "config.json").write_text(json.dumps({**config, **SHAPES[shape], **changed}))
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
