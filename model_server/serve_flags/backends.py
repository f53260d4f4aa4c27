"""Flags for the runner: a real model, or a cost model and the times of its steps. Caller: `settings`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from model_server.calibrate.cost_file import read_costs
from model_server.runners.cost import CostModel
from model_server.serve_flags.argument import Group, choice, value
from model_server.server.backends import CostSettings, HfSettings

_COST_FLAGS = (
    ("--prefill-tokens-per-s", "N", "prefill_tokens_per_s", 1.0, "speed of prefill at the start of a prompt"),
    ("--context-knee-tokens", "N", "context_knee_tokens", 1.0, "position in a prompt at which prefill takes twice as long for each token"),
    ("--decode-step-ms", "MS", "decode_step_s", 1e-3, "time of a step that decodes one request"),
    ("--decode-per-request-ms", "MS", "decode_per_request_s", 1e-3, "time that each further request adds to a step that decodes"),
    ("--interference", "X", "interference", 1.0, "share of extra time that prefill takes in a step that also decodes"),
    ("--lora-load-ms", "MS", "lora_load_s", 1e-3, "time to load an adapter into a batch"),
    ("--speed", "FACTOR", "speed", 1.0, "divide all durations by this factor"),
)  # fmt: skip
"""Each entry has the flag, its unit, the field of `CostModel`, the factor from the flag's unit to the field's
unit, and the meaning.
"""


def add_groups(run: argparse.ArgumentParser) -> None:
    _add_hf(run.add_argument_group("real model", "with --runner hf"))
    _add_costs(
        run.add_argument_group(
            "costs", "with --runner cost: the time that steps take; --speed divides all of these times"
        )
    )


def backend(args: argparse.Namespace) -> CostSettings | HfSettings:
    """Return the backend that the flags describe. Raise ValueError if a flag has an invalid value, or --cost
    cannot be read.
    """
    return _cost_settings(args) if args.runner == "cost" else _hf_settings(args)


def _add_hf(group: Group) -> None:
    device = "device of the model: cpu, cuda, cuda:1 ...; auto takes a GPU if torch finds one"
    value(group, "--device", "NAME", device, default="auto")
    dtype = "number format of weights and cache; auto is float32 on a CPU, bfloat16 on a GPU"
    choice(group, "--dtype", ("auto", "float32", "bfloat16", "float16"), dtype)
    value(
        group,
        "--threads",
        "N",
        "torch's threads on a CPU; give engines that share cores one thread each (default: half of the cores)",
    )


def _add_costs(group: Group) -> None:
    costs = CostModel()
    value(
        group,
        "--cost",
        "FILE",
        "file of costs that `model-server calibrate` wrote; the flags below override the file (default: costs of an 8B model on "
        "one GPU)",
        kind=Path,
    )
    for flag, unit, name, factor, meaning in _COST_FLAGS:
        default = getattr(costs, name) / factor
        said = f"{meaning} (default {default:.10g}, or as in --cost)"
        group.add_argument(flag, type=float, dest=name, metavar=unit, help=said)
    value(
        group,
        "--answer-tokens",
        "N",
        "mean length of an answer that no limit cuts short, in tokens",
        default=128,
    )


def _cost_settings(args: argparse.Namespace) -> CostSettings:
    given = {
        name: getattr(args, name) * factor
        for _, _, name, factor, _ in _COST_FLAGS
        if getattr(args, name) is not None
    }
    costs = replace(read_costs(args.cost) if args.cost is not None else CostModel(), **given)
    return CostSettings(costs=costs, mean_answer_tokens=args.answer_tokens)


def _hf_settings(args: argparse.Namespace) -> HfSettings:
    if args.threads is not None and args.threads < 1:
        raise ValueError("--threads must be at least 1")
    return HfSettings(device=args.device, dtype=args.dtype, threads=args.threads)
