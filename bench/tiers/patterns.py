"""Records the tokens that requests of one prefix attend to, from SmolLM2 on text that every Python includes.

The prefix has worked examples of one task (a function's signature, then its purpose), and each request asks
about another function, as the document's data sets do. Attention is exact while it is recorded: no layer
makes a choice. A recording is kept in the cache folder, so that the same patterns are not computed twice.
"""

import hashlib
import importlib
import inspect
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.tiers.samples import MODULES, MemorySource, Sequencer
from model_server.runners.hf import model as hf
from model_server.text.pretrained import PretrainedLanguage
from model_server.tiers.selection import Choice, Seen, head_weights
from model_server.tiers.view import SelectiveView
from model_server.weights.cache import made_once
from model_server.weights.known import SMOLLM2, Progress, find

PROBED_HEADS = 3
NEW_TOKENS = 24
_FORMAT = 2
CARRIED = Path("build/tiers-patterns")
"""Recordings for machines that cannot fetch SmolLM2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    prefix_tokens: int
    prefixes: int = 6
    requests: int = 24
    """The number of requests of each prefix; all of them differ."""
    new_tokens: int = NEW_TOKENS
    """The most new tokens of a request, which is as long as its question."""


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    """The mean weight that a request's queries put on each token of its prefix, times the number of tokens.
    Chance gives 1.
    """

    heads: torch.Tensor
    """The shape is (prefix, request, layer, first heads, token), float16."""
    mean: torch.Tensor
    """The shape is (prefix, request, layer, token), float16, over all heads."""

    @property
    def num_prefixes(self) -> int:
        return int(self.heads.shape[0])

    @property
    def num_requests(self) -> int:
        return int(self.heads.shape[1])

    @property
    def num_layers(self) -> int:
        return int(self.heads.shape[2])


def patterns(recipe: Recipe) -> Patterns:
    """Return the recorded patterns. The first call makes the recording, at about 100 tokens a second."""
    folder = CARRIED / _key(recipe)
    if not folder.exists():
        folder = made_once(f"tiers-patterns/{_key(recipe)}", lambda folder: _record_into(folder, recipe))
    content = torch.load(folder / "patterns.pt")
    return Patterns(content["heads"], content["mean"])


def carry(recipe: Recipe) -> Path:
    """Copy a recording to `CARRIED`, and return its folder. It is recorded if there is none."""
    made, folder = patterns(recipe), CARRIED / _key(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"heads": made.heads, "mean": made.mean}, folder / "patterns.pt")
    return folder


def _key(recipe: Recipe) -> str:
    document = json.dumps({"format": _FORMAT, **asdict(recipe)}, sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def record(recipe: Recipe, *, progress: Progress) -> Patterns:
    hf.use_threads(1)
    weights = find(SMOLLM2, progress=progress)
    module = hf.load(weights, device=torch.device("cpu"), dtype=torch.float32)
    prompts = _prompts(PretrainedLanguage(weights), recipe)
    longest = max(len(request) for _, requests in prompts for request in requests)
    sequencer = Sequencer(module, max_tokens=recipe.prefix_tokens + longest)
    recorded = list(_recorded(sequencer, prompts, progress))
    heads, mean = (
        torch.stack([pair[part] for pair in recorded]).unflatten(0, (recipe.prefixes, recipe.requests))
        for part in (0, 1)
    )
    return Patterns(heads, mean)


def _record_into(folder: Path, recipe: Recipe) -> None:
    recorded = record(recipe, progress=lambda text: print(text, flush=True))
    torch.save({"heads": recorded.heads, "mean": recorded.mean}, folder / "patterns.pt")


def _recorded(
    sequencer: Sequencer, prompts: Sequence[tuple[list[int], list[list[int]]]], progress: Progress
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    config = sequencer.model.module.config
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    for number, (prefix, requests) in enumerate(prompts, start=1):
        progress(f"recording prefix {number} of {len(prompts)}, {len(prefix)} tokens")
        sequencer.compute(prefix, start=0, num_logits=1)
        source = MemorySource(sequencer.model.memory, sequencer.blocks, len(prefix), num_kv_heads)
        for request in requests:
            seen_by: list[torch.Tensor] = []

            def look(seen: Seen, kept: list[torch.Tensor] = seen_by) -> Choice:
                kept.append(head_weights(seen, num_heads=num_heads, group=num_heads // num_kv_heads))
                return Choice(None)

            view = SelectiveView(source, look)
            sequencer.compute(prefix + request, start=len(prefix), view=view, num_logits=1)
            weights = torch.stack(seen_by) * len(prefix)
            yield weights[:, :PROBED_HEADS].half(), weights.mean(1).half()


def _prompts(language: PretrainedLanguage, recipe: Recipe) -> list[tuple[list[int], list[list[int]]]]:
    rng = random.Random(11)
    examples = _examples()
    prompts = []
    for _ in range(recipe.prefixes):
        drawn = rng.sample(examples, len(examples))
        text, asked = "", 0
        prefix: list[int] = []
        while len(prefix) < recipe.prefix_tokens:
            question, answer = drawn[asked]
            text, asked = text + f"{question} {answer}\n\n", asked + 1
            prefix = [int(token) for token in language.encode(text)]
        requests = []
        for question, _ in drawn[asked : asked + recipe.requests]:
            tokens = [int(token) for token in language.encode("\n\n" + question)]
            requests.append(tokens[: recipe.new_tokens])
        prompts.append((prefix[: recipe.prefix_tokens], requests))
    return prompts


def _examples() -> list[tuple[str, str]]:
    """Return examples of functions and methods of the standard library: the question, and its answer."""
    found: dict[str, tuple[str, str]] = {}
    for name in MODULES:
        module: Any = importlib.import_module(name)
        owners = [module, *(own for _, own in inspect.getmembers(module, inspect.isclass))]
        for owner in owners:
            for called, function in inspect.getmembers(owner, inspect.isfunction):
                purpose = (inspect.getdoc(function) or "").strip().split("\n")[0]
                if called.startswith("_") or not 20 <= len(purpose) <= 120:
                    continue
                signature = str(inspect.signature(function))
                if len(signature) <= 60:
                    found.setdefault(purpose, (f"Function: {called}{signature}\nPurpose:", purpose))
    return sorted(found.values())
