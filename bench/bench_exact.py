"""Measures what exact mode costs: CPU for each routed prompt and each event, and how long picks wait for
exact mode's thread.

python -m bench.bench_exact
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from epp.config.policy import DEFAULT_POLICY
from epp.decision import PickRequest
from epp.kvevents.block_hashes import BlockHasher, BlockName
from epp.kvevents.chunks import MappedPrompt
from epp.kvevents.decoding import Removed, Stored
from epp.kvevents.knowledge import Knowledge
from epp.kvevents.language import FolderLanguage
from epp.kvevents.mapping import map_prompt
from epp.kvevents.routed_prompts import RoutedPrompt
from epp.picker.picker import Picker
from epp.picker.server_caches import hash_chain
from epp.prefix_index.kv_reports import Tier
from epp.prefix_index.table import ChunkSchedule
from epp.request.parse import parse_request
from epp.types import Address, Endpoint, EndpointName, InferenceRequest
from tests.unit.kvevents.a_language import write_language

_SCHEDULE = ChunkSchedule()
_SIZES_KB = (1, 40, 400)
_SECONDS = 1.0
_ROUNDS = 5
_PAUSE_S = 0.001


def chat_of_size(kilobytes: int, seed: int) -> InferenceRequest:
    rng = random.Random(seed)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "pack", "my", "box", "jugs"]
    text = " ".join(rng.choices(words, k=kilobytes * 1024 // 5))[: kilobytes * 1024]
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return parse_request("/v1/chat/completions", json.dumps(body).encode())


def routed_prompt(inference: InferenceRequest) -> RoutedPrompt:
    return RoutedPrompt(
        server=EndpointName("s0"),
        process=0,
        adapter="",
        inference=inference,
        chain=hash_chain(inference.prompt, seed=1, schedule=_SCHEDULE),
        schedule=_SCHEDULE,
    )


def median_ms(work: Callable[[], object], *, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return 1000 * statistics.median(times)


def print_prompt_costs(language: FolderLanguage) -> None:
    print(
        "| prompt | tokens | template and tokens, ms | names of blocks, ms | chunks of 8 servers, ms |\n|---|---|---|---|---|"
    )
    hasher = BlockHasher("sha256")
    for kilobytes in _SIZES_KB:
        prompt = routed_prompt(chat_of_size(kilobytes, 1))
        rounds = max(5, 200 // kilobytes)
        mapped = map_prompt(prompt, language=language, hasher=hasher, block_tokens=16, adapter_path=None)
        whole = median_ms(
            lambda p=prompt: map_prompt(
                p, language=language, hasher=hasher, block_tokens=16, adapter_path=None
            ),  # type: ignore[misc]  # mypy cannot type a lambda's default
            rounds=rounds,
        )
        ids = list(range(16 * len(mapped.blocks)))
        names = median_ms(lambda i=ids: hasher.names(i, block_tokens=16), rounds=rounds)  # type: ignore[misc]  # the same reason
        knowledge = knowledge_of(8)

        def follow(p: MappedPrompt = mapped) -> None:
            knowledge.map(p, now=1.0)  # noqa: B023 - called only in this round of the loop
            knowledge.findings(now=1.0)  # noqa: B023 - the same reason

        follow()
        print(
            f"| {kilobytes} KB | {len(ids)} | {whole - names:.2f} | {names:.2f} | {median_ms(follow, rounds=rounds):.2f} |"
        )


def knowledge_of(servers: int) -> Knowledge:
    knowledge = Knowledge(max_blocks=10**7, max_chunks=10**5)
    for n in range(servers):
        knowledge.add(EndpointName(f"s{n}"))
        knowledge.servers[EndpointName(f"s{n}")].trusted = True
    return knowledge


def print_event_cost() -> None:
    knowledge, name = knowledge_of(1), EndpointName("s0")
    blocks = [BlockName(random.Random(1).getrandbits(64)) for _ in range(100_000)]
    started = time.thread_time()
    for start in range(0, len(blocks), 64):
        knowledge.apply(name, Stored(tuple(blocks[start : start + 64]), Tier.GPU), now=1.0)
    for block in blocks:
        knowledge.apply(name, Removed((block,), Tier.GPU), now=1.0)
    print(f"\na block stored and removed: {1e6 * (time.thread_time() - started) / len(blocks):.1f} us")


def delay_of_picks(language: FolderLanguage, *, switch_s: float, busy: bool) -> Sequence[float]:
    """Return the seconds from the moment at which a pick is due to the end of the pick, while another thread
    maps prompts of 40 KB without a pause.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(switch_s)
    stop = threading.Event()
    prompts, hasher = [routed_prompt(chat_of_size(40, n)) for n in range(8)], BlockHasher("sha256")

    def work() -> None:
        while not stop.is_set():
            for prompt in prompts:
                map_prompt(prompt, language=language, hasher=hasher, block_tokens=16, adapter_path=None)

    thread = threading.Thread(target=work)
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    picker.set_endpoints(
        [Endpoint(EndpointName(f"s{n}"), Address(f"10.0.0.{n + 1}", 80)) for n in range(8)], now=0.0
    )
    request = PickRequest("r", chat_of_size(4, 99), body_bytes=4096)
    times = []
    if busy:
        thread.start()
    end = time.perf_counter() + _SECONDS
    while (due := time.perf_counter() + _PAUSE_S) < end:
        time.sleep(_PAUSE_S)
        pick = picker.pick(request, now=due)
        times.append(time.perf_counter() - due)
        picker.end(pick, outcome="ended", now=due)
    stop.set()
    if busy:
        thread.join()
    sys.setswitchinterval(before)
    return sorted(times)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        language = FolderLanguage(write_language(Path(folder)))
    print_prompt_costs(language)
    print_event_cost()
    print(
        "\n| a pick of 4 KB, from the moment at which it is due; medians of rounds | p50 ms | p99 ms |\n|---|---|---|"
    )
    ways = (
        ("alone", 0.005, False),
        ("the thread is always busy, switch interval 5 ms", 0.005, True),
        ("the same, 0.5 ms", 0.0005, True),
    )
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(_ROUNDS):  # The cases run in turns, because other work on the machine comes and goes.
        for label, switch_s, busy in ways:
            times = delay_of_picks(language, switch_s=switch_s, busy=busy)
            middle, late = times[len(times) // 2], times[int(0.99 * len(times))]
            found.setdefault(label, []).append((middle, late))
    for label, pairs in found.items():
        p50, p99 = (1000 * statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"| {label} | {p50:.2f} | {p99:.2f} |")


if __name__ == "__main__":
    main()
