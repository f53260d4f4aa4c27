"""Fit the cost model to a running server. The command measures prefill, decoding, and both together, over the
server's OpenAI API.

The server should do nothing else during the measurement. It has to stream one token in each event, and to
accept token ids as prompts and `ignore_eos`. This model server does so with --runner hf, and so does vLLM.
`serve --cost FILE` reads the file that this command writes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final

import aiohttp

from model_server.calibrate.client import CalibrationError, ServerUnderTest, find_model
from model_server.calibrate.cost_file import cost_document
from model_server.calibrate.fit import Fit, FitError, Quality, fit
from model_server.calibrate.probes import Probe, Sample, fastest, plan, sample_of

_LEAST_PROMPT_TOKENS: Final = 64
_ANSWER_TOKENS: Final = 80
"""Tokens of a context that are kept for the answer. The longest answer of a probe has 64."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", required=True, metavar="URL", help="address of the server, for example http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="model to measure (default: the first in the server's list)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write the costs to (default: print them)"
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="longest prompt that is sent, in tokens; its prefill should take many times as long as a decode step (default %(default)s)",
    )
    parser.add_argument(
        "--max-batch",
        type=int,
        default=8,
        metavar="N",
        help="largest number of requests that are sent at the same time (default %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="number of times that each measurement is made; the fastest one counts (default %(default)s)",
    )
    parser.add_argument(
        "--api-key-env",
        default="VLLM_API_KEY",
        metavar="NAME",
        help="environment variable that holds the server's API key, if the server asks for a key (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 if the times were fitted, 1 if the server could not be measured or its times do not fit, 2
    for bad flags.
    """
    if args.max_prompt_tokens < _LEAST_PROMPT_TOKENS or args.max_batch < 2 or args.repeats < 1:
        print(
            f"model-server: --max-prompt-tokens must be at least {_LEAST_PROMPT_TOKENS}, --max-batch at least 2, "
            "and --repeats at least 1",
            file=sys.stderr,
        )
        return 2
    if not args.url.startswith(("http://", "https://")):
        print("model-server: --url must be an http URL", file=sys.stderr)
        return 2
    try:
        text = asyncio.run(_calibrate(args))
        if args.out is None:
            print(text, end="")
        else:
            args.out.write_text(text)
            print(f"{args.out}: use it with `model-server serve --cost {args.out}`")
    except* (CalibrationError, FitError, aiohttp.ClientError, OSError) as errors:
        print(f"model-server: {_first(errors)}", file=sys.stderr)
        return_code = 1
    else:
        return_code = 0
    return return_code


def longest_prompt(asked_tokens: int, context_tokens: int | None) -> int:
    """Return the tokens of the longest prompt to send. context_tokens: the length of the model's context, or
    None if the server does not name it. Raises CalibrationError if the context is too short for the probes.
    """
    if context_tokens is None:
        return asked_tokens
    most = min(asked_tokens, context_tokens - _ANSWER_TOKENS)
    if most < _LEAST_PROMPT_TOKENS:
        raise CalibrationError(
            f"the context of the model has {context_tokens} tokens, and the measurement needs at least "
            f"{_LEAST_PROMPT_TOKENS + _ANSWER_TOKENS}: measure a model with a longer context"
        )
    return most


async def _calibrate(args: argparse.Namespace) -> str:
    key = os.environ.get(args.api_key_env)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    base = args.url.rstrip("/") + "/"
    async with aiohttp.ClientSession(base, headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
        model, longest = await find_model(http, args.model)
        most = longest_prompt(args.max_prompt_tokens, longest)
        server = ServerUnderTest(http, model=model, rng=random.Random())
        probes = plan(max_prompt_tokens=most, max_batch=args.max_batch, repeats=args.repeats)
        await server.observe(probes[0])  # the first request is slow: the process compiles and allocates
        measured: dict[Probe, list[Sample]] = {probe: [] for probe in probes}
        for number, probe in enumerate(probes, start=1):
            print(f"\r{number}/{len(probes)} measurements", end="", file=sys.stderr, flush=True)
            sample = sample_of(probe, await server.observe(probe))
            if sample is not None:
                measured[probe].append(sample)
    print(file=sys.stderr)
    samples = fastest(measured)
    found = fit(samples)
    print(_about(found), file=sys.stderr)
    source = {"url": args.url, "model": model, "max_prompt_tokens": most, "samples": len(samples)}
    return cost_document(found.costs, fit=_fit_document(found), source=source)


def _about(found: Fit) -> str:
    costs = found.costs
    prefill = f"{costs.prefill_tokens_per_s:,.0f} tokens/s, twice the time for each token after {costs.context_knee_tokens:,.0f} tokens"
    step = f"{costs.decode_step_s * 1e3:.2f} ms, {costs.decode_per_request_s * 1e3:.3f} ms for each further request"
    context = f"{costs.decode_per_context_token_s * 1e6:.3f} us for each token of context"
    return "\n".join(
        (
            f"prefill  {prefill}  {_quality(found.prefill)}",
            f"decode   {step}, {context}  {_quality(found.decode)}",
            f"both     prefill takes {costs.interference:.0%} longer beside decoding  {_quality(found.mixed)}",
            f"left out: {found.overhead_s * 1e3:.1f} ms that each request takes in addition, and the time to load adapters",
        )
    )


def _quality(quality: Quality | None) -> str:
    if quality is None:
        return "(not measured: the default value)"
    return f"(R² {quality.r2:.4f}, median error {quality.median_error:.1%}, {quality.samples} samples)"


def _fit_document(found: Fit) -> dict[str, object]:
    parts = {"prefill": found.prefill, "decode": found.decode, "mixed": found.mixed}
    qualities = {
        name: {key: round(value, 5) for key, value in asdict(quality).items()}
        for name, quality in parts.items()
        if quality is not None
    }
    return {**qualities, "overhead_s": round(found.overhead_s, 6)}


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the innermost error of the first group; the group's other errors follow from this one."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
