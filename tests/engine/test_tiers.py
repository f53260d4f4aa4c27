"""The probe, selective attention and the tiers on real computation: small random models, and SmolLM2."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from bench.tiers.bench_accuracy import ORACLE, PROBE, RANDOM, SINKS, measure
from bench.tiers.samples import MemorySource, Sequencer, cut, manual_pages
from model_server.runners.hf import model as hf
from model_server.text.pretrained import PretrainedLanguage
from model_server.tiers.layout import TokenOrder
from model_server.tiers.reader import TieredReader
from model_server.tiers.records import Records
from model_server.tiers.segment import Segment
from model_server.tiers.selection import Choice, Seen, choose, in_few_chunks, probe
from model_server.tiers.settings import EVERY_CHUNK, SelectionSettings
from model_server.tiers.similarity import threshold
from model_server.tiers.store import PrefixStore
from model_server.tiers.view import SelectiveView
from model_server.weights.known import SMOLLM2, find
from tests.engine.harness import tokens
from tests.engine.tiny_models import tiny
from tests.harness.engine_requests import block_hashes_of

BLOCK = 8
PREFIX = 40
HEADS = 6
HEADS_OF_EACH_KIND = pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
"""Llama's 6 query heads share 2 KV heads. The others have 6 KV heads: full multi-head attention."""


class Tiny:
    """A small model, a store, and a reader over it."""

    def __init__(
        self,
        folder: Path,
        settings: SelectionSettings,
        capacities: tuple[int, int],
        store: type[PrefixStore] = PrefixStore,
        *,
        family: str = "llama",
    ) -> None:
        self.sequencer = Sequencer(tiny(family), max_tokens=80, block_size_tokens=BLOCK)
        self.memory = self.sequencer.model.memory
        self.group = HEADS // self.memory.shape.num_kv_heads
        records = Records(shape=self.memory.shape, probe_kv_heads=-(-settings.probe_heads // self.group))
        layout = records.layout("tiny", block_tokens=BLOCK, chunk_tokens=4)
        self.store = store(folder, layout, capacity_bytes=10_000_000)
        self.reader = TieredReader(self.store, records, settings, capacities_bytes=capacities)
        self.settings = settings

    def put(self, prefix: list[int]) -> None:
        self.sequencer.compute(prefix, start=0)
        blocks = self.sequencer.blocks[: len(prefix) // BLOCK]
        self.store.put(
            block_hashes_of(prefix, block_tokens=BLOCK),
            self.reader.records.of_blocks(self.memory.data.index_select(2, blocks).cpu()),
        )

    def by_probe(self, seen: Seen) -> Choice:
        return probe(seen, settings=self.settings, group=self.group)

    def ask(self, token_ids: list[int]) -> tuple[torch.Tensor, SelectiveView]:
        """Return the logits after the stored prefix. Paged memory does not hold its keys and values."""
        prefix = self.reader.open(block_hashes_of(token_ids[:PREFIX], block_tokens=BLOCK))
        assert prefix is not None
        view = SelectiveView(prefix, self.by_probe)
        self.memory.data.zero_()
        logits = self.sequencer.compute(token_ids, start=prefix.num_tokens, view=view)
        self.reader.finish(prefix, view.choices.items())
        self.reader.check_integrity()
        self.store.check_integrity()
        return logits, view


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Tiny] = []

    def make_tiny(
        settings: SelectionSettings,
        capacities: tuple[int, int] = (2000, 6000),
        store: type[PrefixStore] = PrefixStore,
        *,
        family: str = "llama",
    ) -> Tiny:
        made.append(Tiny(tmp_path / str(len(made)), settings, capacities, store, family=family))
        return made[-1]

    yield make_tiny
    for each in made:
        each.reader.close()
        each.store.close()


@HEADS_OF_EACH_KIND
def test_002_2_layers_whose_heads_disagree_load_everything_and_are_exact(make: Any, family: str) -> None:
    """A threshold of 1 forces every layer to fall back, since only layers that keep all tokens reach it."""
    system = make(SelectionSettings(ratio=0.97), family=family)
    token_ids = tokens(60, seed=1)
    exact = system.sequencer.compute(token_ids, start=0)[PREFIX:]
    system.put(token_ids[:PREFIX])
    logits, view = system.ask(token_ids)
    assert [choice.tokens for choice in view.choices.values()] == [None] * 3
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)


@HEADS_OF_EACH_KIND
def test_002_2_a_layer_with_alike_heads_loads_the_chosen_tokens_alone(make: Any, family: str) -> None:
    """The tiers give what attention over the same tokens in memory gives, before and after reordering."""
    system = make(SelectionSettings(ratio=0.25, alpha=1.0, chunk_share=EVERY_CHUNK), family=family)
    token_ids = tokens(60, seed=1)
    system.put(token_ids[:PREFIX])
    source = MemorySource(
        system.memory, system.sequencer.blocks, PREFIX, system.reader.records.probe_kv_heads
    )
    in_memory = SelectiveView(source, system.by_probe)
    expected = system.sequencer.compute(token_ids, start=PREFIX, view=in_memory)
    assert any(choice.tokens is not None for choice in in_memory.choices.values())
    for reordered in (0, 1, 0):
        if reordered:
            assert system.reader.reorder() == 1
        logits, view = system.ask(token_ids)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        for layer, choice in view.choices.items():
            assert (choice.tokens is None) == (in_memory.choices[layer].tokens is None)


def test_later_steps_of_a_request_see_the_tokens_that_its_first_step_chose(make: Any) -> None:
    system = make(SelectionSettings(ratio=0.97))
    token_ids = tokens(60, seed=2)
    exact = system.sequencer.compute(token_ids, start=0)
    system.put(token_ids[:PREFIX])
    _, view = system.ask(token_ids[:50])
    for end in range(51, 55):
        logits = system.sequencer.compute(token_ids[:end], start=end - 1, view=view)
        torch.testing.assert_close(logits[0], exact[end - 1], rtol=1e-4, atol=1e-4)


def test_a_prefix_in_several_nodes_is_read_across_them(make: Any) -> None:
    system = make(SelectionSettings(ratio=0.97), capacities=(0, 0))
    token_ids, other = tokens(60, seed=3), tokens(16, seed=3) + tokens(24, seed=4)
    exact = system.sequencer.compute(token_ids, start=0)[PREFIX:]
    system.put(other)
    system.put(token_ids[:PREFIX])
    assert len(system.store.match(block_hashes_of(token_ids[:PREFIX], block_tokens=BLOCK))) == 2
    for _ in range(2):
        logits, _ = system.ask(token_ids)
        torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)
        system.reader.reorder()
    assert sum(system.reader.found_in[:2]) == 0, "tiers without room find nothing"


def test_chunks_that_were_read_are_in_the_fast_tiers_and_not_read_again(make: Any) -> None:
    system = make(SelectionSettings(ratio=0.25), capacities=(1 << 20, 1 << 20))
    token_ids = tokens(60, seed=1)
    system.put(token_ids[:PREFIX])
    system.ask(token_ids)
    read = system.store.disk.counts.bytes
    assert read > 0
    system.ask(token_ids)
    assert system.store.disk.counts.bytes == read
    assert system.reader.resident_bytes(0) > 0


def test_a_node_is_reordered_after_two_requests_and_read_again(make: Any) -> None:
    system = make(SelectionSettings(ratio=0.97), capacities=(1 << 20, 1 << 20))
    token_ids = tokens(60, seed=1)
    system.put(token_ids[:PREFIX])
    expected, _ = system.ask(token_ids)
    assert not system.reader.reorder_next(), "one request is not enough"
    system.ask(token_ids)
    [before] = system.store.segments()
    assert system.reader.reorder_next()
    assert not system.reader.reorder_next()
    [after] = system.store.segments()
    assert after.orders != before.orders
    system.reader.check_integrity()
    for _ in range(2):
        logits, _ = system.ask(token_ids)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    read = system.store.disk.counts.bytes
    system.ask(token_ids)
    assert system.store.disk.counts.bytes == read, "the fast tiers hold the new chunks"


def test_a_request_may_read_a_node_while_it_is_reordered(make: Any) -> None:
    class Hasty(PrefixStore):
        def reorder(self, old: Segment, orders: Sequence[TokenOrder]) -> Segment | None:
            new = super().reorder(old, orders)
            asked.append(system.ask(token_ids)[0])
            return new

    asked: list[torch.Tensor] = []
    system = make(SelectionSettings(ratio=0.97), capacities=(1 << 20, 1 << 20), store=Hasty)
    token_ids = tokens(60, seed=1)
    system.put(token_ids[:PREFIX])
    expected, _ = system.ask(token_ids)
    system.ask(token_ids)
    assert system.reader.reorder_next()
    system.reader.check_integrity()
    for logits in (*asked, system.ask(token_ids)[0]):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_chunks_that_are_foreseen_are_read_ahead_and_only_once(make: Any) -> None:
    system = make(SelectionSettings(ratio=0.25))
    token_ids = tokens(60, seed=5)
    exact = system.sequencer.compute(token_ids, start=0)[PREFIX:]
    system.put(token_ids[:PREFIX])
    prefix = system.reader.open(block_hashes_of(token_ids[:PREFIX], block_tokens=BLOCK))
    prefix.foresee(torch.arange(PREFIX))
    view = SelectiveView(prefix, lambda _: Choice(None))
    logits = system.sequencer.compute(token_ids, start=PREFIX, view=view)
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)
    assert system.store.disk.counts.reads == 3 * (1 + PREFIX // 4), (
        "probed keys and chunks of each layer, once"
    )


def test_002_3_lone_tokens_are_swapped_for_best_of_chunks_that_are_read() -> None:
    """Chunks have 4 tokens. Two chunks are dense, and two others have one stray token each."""
    importance = torch.tensor([9.0, 8, 7, 0, 6, 5, 4, 1, 3, 0, 0, 0, 2, 0, 0, 0])
    chunks = torch.arange(16) // 4
    chosen = importance.topk(8).indices
    for share, expected in ((1.0, {0, 1, 2, 4, 5, 6, 8, 12}), (0.8, {0, 1, 2, 3, 4, 5, 6, 7})):
        assert set(in_few_chunks(importance, chosen, chunks=chunks, share=share).tolist()) == expected
    alone = importance.topk(1).indices
    assert in_few_chunks(importance, alone, chunks=chunks, share=0.5).tolist() == [0]


def test_002_3_a_choice_of_few_chunks_keeps_its_size_and_reads_no_more() -> None:
    generator = torch.Generator().manual_seed(3)
    chunks = torch.randperm(60, generator=generator) // 8
    for _ in range(20):
        heads = torch.rand(1, 60, generator=generator) ** 8
        reads = []
        for share in (1.0, 0.95, 0.7):
            tokens = choose(
                heads, settings=SelectionSettings(ratio=0.25, chunk_share=share), chunks=chunks
            ).tokens
            assert tokens is not None
            assert tokens.tolist() == sorted(set(tokens.tolist()))
            assert len(tokens) == 15
            reads.append(len(chunks[tokens].unique()))
        assert reads == sorted(reads, reverse=True)


def test_002_3_the_tiers_know_in_which_chunks_tokens_are(make: Any) -> None:
    system = make(SelectionSettings(ratio=0.25, alpha=1.0, chunk_share=0.6), capacities=(0, 0))
    token_ids, other = tokens(60, seed=3), tokens(16, seed=3) + tokens(24, seed=4)
    system.put(token_ids[:PREFIX])
    system.put(other)
    for _ in range(2):
        system.ask(token_ids)
        prefix = system.reader.open(block_hashes_of(token_ids[:PREFIX], block_tokens=BLOCK))
        for layer in range(3):
            prefix.probe_keys(layer)
        for layer in range(3):
            numbers = prefix.chunks(layer)
            assert sorted(numbers.tolist()) == [token // 4 for token in range(PREFIX)]
            for number in (0, PREFIX // 4 - 1):
                before = system.store.disk.counts.reads
                prefix.read(layer, (numbers == number).nonzero().flatten())
                assert system.store.disk.counts.reads == before + 1, "one chunk, one read"
                prefix.probe_keys(layer)
        system.reader.reorder()


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, Any]:
    folder = find(SMOLLM2, progress=print)
    return folder, hf.load(folder, device=torch.device("cpu"), dtype=torch.float32)


def test_002_1_and_002_7_on_a_real_model_half_of_the_tokens_answer(smollm2: tuple[Path, Any]) -> None:
    folder, module = smollm2
    samples = cut(manual_pages(), PretrainedLanguage(folder), length_tokens=144, count=2)
    found = measure(copy.deepcopy(module), samples, prefix_tokens=128, ratios=[0.25, 0.5])
    for ratio in (0.25, 0.5):
        assert fmean(found[ratio, PROBE].similarity) > threshold(round(128 * ratio), 128)
        assert 5 * fmean(found[ratio, PROBE].kl) < fmean(found[ratio, RANDOM].kl)
        assert fmean(found[ratio, ORACLE].kl) < fmean(found[ratio, PROBE].kl)
    half = found[0.5, PROBE]
    print(
        "\n002-7: at 50 %: "
        + ", ".join(
            f"{name}: same token {fmean(found[0.5, name].same):.3f}, KL {fmean(found[0.5, name].kl):.3f}"
            for name in (PROBE, SINKS, ORACLE, RANDOM)
        )
    )
    assert fmean(half.same) >= 0.93
    assert fmean(half.kl) <= 0.08
    assert fmean(half.same) > fmean(found[0.5, RANDOM].same)
