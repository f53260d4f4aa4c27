"""Block hashes: which are equal, vLLM's formulas against recorded events, and scopes."""

import hashlib
import random
import struct
from collections.abc import Iterator, Sequence

import pytest

from model_server.core.hashing import (
    HASH_ALGORITHMS,
    BlockHash,
    BlockHasher,
    HashAlgorithm,
    PrefixScope,
    event_hash,
)
from tests.contract.recordings import read_kv_events
from tests.contract.vllm_block_hashes import block_hashes

PLAIN = PrefixScope()


class DirectHasher(BlockHasher):
    """sha256 over all tokens up to the block's end, as document 000 has it beside the chain."""

    def name(
        self, chain: Sequence[BlockHash], token_ids: Sequence[int], *, end: int, scope: PrefixScope
    ) -> BlockHash:
        del chain, scope
        return BlockHash(hashlib.sha256(struct.pack(f"<{end}I", *token_ids[:end])).digest())


def chain_of(
    hasher: BlockHasher, tokens: list[int], *, scope: PrefixScope = PLAIN, num_blocks: int | None = None
) -> list[BlockHash]:
    chain: list[BlockHash] = []
    full = len(tokens) // hasher.block_size_tokens
    hasher.extend(chain, tokens, num_blocks=full if num_blocks is None else num_blocks, scope=scope)
    return chain


def prompts_that_share(rng: random.Random, *, num_blocks: int, block: int) -> Iterator[list[int]]:
    """Make prompts of 8 blocks until there are `num_blocks` blocks. Half of them begin like an earlier
    one.
    """
    earlier: list[list[int]] = []
    for _ in range(num_blocks // 8):
        start = rng.choice(earlier)[: rng.randrange(8 * block)] if earlier and rng.random() < 0.5 else []
        prompt = start + [rng.randrange(50_000) for _ in range(8 * block - len(start))]
        earlier = [*earlier[-50:], prompt]
        yield prompt


@pytest.mark.slow
def test_000_1_chained_and_direct_hashes_name_the_same_prefixes() -> None:
    block = 4
    hashers: dict[str, BlockHasher] = {"direct": DirectHasher("sha256", block_size_tokens=block)}
    hashers |= {name: BlockHasher(name, block_size_tokens=block) for name in HASH_ALGORITHMS}
    prefix_of: dict[tuple[str, BlockHash], tuple[int, ...]] = {}
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for prompt in prompts_that_share(random.Random(1), num_blocks=100_000, block=block):
        chains = {name: chain_of(hasher, prompt) for name, hasher in hashers.items()}
        for index in range(8):
            prefix = tuple(prompt[: (index + 1) * block])
            hits += prefix in seen
            for name, chain in chains.items():
                known = (name, chain[index]) in prefix_of
                assert known == (prefix in seen), f"{name}: another hit than the prefix itself gives"
                assert prefix_of.setdefault((name, chain[index]), prefix) == prefix, f"{name}: a collision"
            seen.add(prefix)
    assert hits > 10_000
    print(f"\n000-1: 100,000 blocks, {hits} hits with each of {', '.join(hashers)}, 0 collisions")


def test_000_1_only_direct_hashing_covers_quadratically_many_tokens() -> None:
    class Counting(list[int]):
        """Counts the tokens that are read from it."""

        read = 0

        def __getitem__(self, key: object) -> list[int]:  # type: ignore[override]  # slices are all that is used
            assert isinstance(key, slice)
            part = super().__getitem__(key)
            self.read += len(part)
            return part

    def tokens_read(hasher: BlockHasher, num_blocks: int) -> int:
        tokens = Counting(range(16 * num_blocks))
        hasher.extend([], tokens, num_blocks=num_blocks, scope=PLAIN)
        return tokens.read

    chained, direct = (
        BlockHasher("sha256", block_size_tokens=16),
        DirectHasher("sha256", block_size_tokens=16),
    )
    assert [tokens_read(chained, n) for n in (100, 200, 400)] == [1600, 3200, 6400]
    assert [tokens_read(direct, n) for n in (100, 200, 400)] == [
        16 * n * (n + 1) // 2 for n in (100, 200, 400)
    ]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_vllms_formulas_give_the_hashes_of_its_recorded_events(algorithm: HashAlgorithm) -> None:
    recording = read_kv_events(algorithm)
    hasher = BlockHasher(algorithm, block_size_tokens=recording.block_tokens, seed=recording.hash_seed)
    ours: set[int] = set()
    for request in recording.requests:
        adapter = "" if request.model == "tiny" else request.model
        scope = PrefixScope(adapter, adapter, request.cache_salt or "")
        ours |= {event_hash(h) for h in chain_of(hasher, list(request.computed_token_ids), scope=scope)}
    stored = [event for event in recording.events() if event["type"] == "BlockStored"]
    assert {h for event in stored for h in event["block_hashes"]} == ours
    assert len(ours) > 60


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("adapter", [None, ("a", "/adapters/a"), ("same", "same"), ("x", "x")])
@pytest.mark.parametrize("salt", [None, "tenant", "lora"])
def test_vllms_formulas_hold_for_large_tokens_adapters_and_salts(
    algorithm: HashAlgorithm, adapter: tuple[str, str] | None, salt: str | None
) -> None:
    tokens = [0, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1] * 6
    name, path = adapter or ("", "")
    # The rule pickles its arguments. As in a server the strings are parsed, so they are different objects.
    # Python has only one object for each single character.
    apart = None if adapter is None else (name.encode().decode(), path.encode().decode())
    parsed_salt = None if salt is None else salt.encode().decode()
    expected = block_hashes(
        tokens, algorithm=algorithm, seed="s", block_tokens=16, adapter=apart, cache_salt=parsed_salt
    )
    hasher = BlockHasher(algorithm, block_size_tokens=16, seed="s")
    assert chain_of(hasher, tokens, scope=PrefixScope(name, path, salt or "")) == expected


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_scopes_seeds_and_earlier_tokens_change_every_hash(algorithm: HashAlgorithm) -> None:
    tokens = list(range(64))
    scopes = [
        PLAIN,
        PrefixScope("a"),
        PrefixScope("a", "/p"),
        PrefixScope("", "", "a"),
        PrefixScope("a", "", "a"),
        PrefixScope(cache_salt="sel:0.25"),
        PrefixScope(approximation="sel:0.25"),
        PrefixScope(approximation="sel:0.5"),
        PrefixScope("a", "/p", approximation="sel:0.5"),
    ]
    chains = [chain_of(BlockHasher(algorithm, block_size_tokens=16), tokens, scope=scope) for scope in scopes]
    chains.append(chain_of(BlockHasher(algorithm, block_size_tokens=16, seed="other"), tokens))
    chains.append(chain_of(BlockHasher(algorithm, block_size_tokens=16), [99, *tokens[1:]]))
    assert len({name for chain in chains for name in chain}) == 4 * len(chains)


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_extending_a_chain_in_parts_gives_the_same_chain(algorithm: HashAlgorithm) -> None:
    hasher = BlockHasher(algorithm, block_size_tokens=4)
    tokens, scope = list(range(40)), PrefixScope("a", "/p", "salt")
    chain: list[BlockHash] = []
    for num_blocks in (1, 4, 4, 10):
        hasher.extend(chain, tokens, num_blocks=num_blocks, scope=scope)
    assert chain == chain_of(hasher, tokens, scope=scope)


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_a_partial_block_has_a_hash_of_its_own(algorithm: HashAlgorithm) -> None:
    hasher, tokens = BlockHasher(algorithm, block_size_tokens=4), list(range(8))
    chain = chain_of(hasher, tokens, num_blocks=1)
    names = {hasher.name(chain, tokens, end=end, scope=PLAIN) for end in (5, 6, 7, 8)}
    assert len(names) == 4
    assert chain_of(hasher, tokens)[1] in names


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        BlockHasher("sha256", block_size_tokens=0)
