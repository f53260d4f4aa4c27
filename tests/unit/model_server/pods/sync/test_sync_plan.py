"""The part of lora-sync that plans, without a server."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.pods.sync.files import read_adapters
from model_server.pods.sync.plan import (
    Action,
    AdapterName,
    Backoff,
    Load,
    Record,
    Unload,
    failed,
    in_sync,
    next_retry_s,
    observed,
    plan,
    status,
    succeeded,
)

A, B, C = AdapterName("a"), AdapterName("b"), AdapterName("c")
BACKOFF = Backoff(first_s=1.0, most_s=60.0)


def test_missing_adapters_are_loaded_and_loaded_adapters_stay() -> None:
    assert plan({A: "/a", B: "/b"}, {B: "/b"}, {}, now=0.0, prune=False) == [Load(A, "/a")]


def test_only_our_adapters_are_unloaded_and_that_before_loading() -> None:
    history = {A: Record(loaded_path="/a")}
    served = {A: "/a", B: "/b"}
    assert plan({C: "/c"}, served, history, now=0.0, prune=False) == [Unload(A, "/a"), Load(C, "/c")]
    assert plan({C: "/c"}, served, {}, now=0.0, prune=True) == [
        Unload(A, "/a"),
        Unload(B, "/b"),
        Load(C, "/c"),
    ]


def test_another_path_unloads_our_adapter_first_and_is_conflict_for_others() -> None:
    ours = {A: Record(loaded_path="/1")}
    assert plan({A: "/2"}, {A: "/1"}, ours, now=0.0, prune=False) == [Unload(A, "/1")]
    assert plan({A: "/2"}, {A: "/1"}, {}, now=0.0, prune=False) == []
    [line] = status({A: "/2"}, {A: "/1"}, {}, now=0.0, prune=False)
    assert (line.state, "/1" in line.error) == ("conflict", True)
    assert not in_sync([line])


def test_a_failed_load_does_not_make_an_adapter_of_others_ours() -> None:
    tried = failed(None, Load(A, "/a"), error="no files", now=0.0, backoff=BACKOFF, rng=random.Random(1))
    for wanted in ({}, {A: "/a"}):
        assert plan(wanted, {A: "/theirs"}, {A: tried}, now=100.0, prune=False) == []


def test_only_unwanted_adapters_of_ours_break_the_sync() -> None:
    ours = {B: Record(loaded_path="/b")}
    served = {A: "/a", B: "/b"}
    foreign, leaving = status({}, served, ours, now=0.0, prune=False)
    assert (foreign.state, leaving.state) == ("foreign", "leaving")
    assert in_sync([foreign])
    assert not in_sync([leaving])


def test_a_failed_load_waits_but_a_changed_path_does_not() -> None:
    load = Load(A, "/a")
    history = {A: failed(None, load, error="no files", now=10.0, backoff=BACKOFF, rng=random.Random(1))}
    retry_at = history[A].retry_at_s
    assert 10.5 <= retry_at <= 11.0
    assert plan({A: "/a"}, {}, history, now=10.1, prune=False) == []
    assert plan({A: "/a"}, {}, history, now=retry_at, prune=False) == [load]
    assert plan({A: "/other"}, {}, history, now=10.1, prune=False) == [Load(A, "/other")]
    assert next_retry_s(history, now=10.1) == retry_at
    [line] = status({A: "/a"}, {}, history, now=10.1, prune=False)
    assert (line.state, line.failures, line.error) == ("failed", 1, "no files")


def test_waits_double_up_to_a_limit_and_half_of_each_is_random() -> None:
    for failures, longest in ((1, 1.0), (2, 2.0), (5, 16.0), (7, 60.0), (5000, 60.0)):
        delays = [BACKOFF.delay_s(failures, random.Random(seed)) for seed in range(50)]
        assert all(longest / 2 <= delay <= longest for delay in delays)
        assert len(set(delays)) > 40


def test_a_backoff_that_never_waits_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Backoff(first_s=0.0)


def test_failures_are_counted_for_one_action_only() -> None:
    rng = random.Random(1)
    record = None
    for _ in range(3):
        record = failed(record, Load(A, "/a"), error="x", now=0.0, backoff=BACKOFF, rng=rng)
    assert record is not None
    assert record.failures == 3
    other = failed(record, Load(A, "/b"), error="x", now=0.0, backoff=BACKOFF, rng=rng)
    assert other.failures == 1


def test_adapters_that_a_restarted_server_lost_are_not_ours() -> None:
    history = {A: Record(loaded_path="/a"), B: Record(loaded_path="/b"), C: Record(loaded_path="/c")}
    after = observed(history, wanted={A: "/a"}, served={B: "/b"})
    assert after == {A: Record(), B: Record(loaded_path="/b")}


@dataclass
class PretendServer:
    """Fails when the test says so. It keeps the adapters that it started with until it is asked to unload
    them.
    """

    served: dict[AdapterName, str]
    asked: list[Action] = field(default_factory=list)

    def do(self, action: Action) -> bool:
        self.asked.append(action)
        if isinstance(action, Load):
            assert action.name not in self.served, "loaded over another adapter"
            self.served[action.name] = action.path
        else:
            del self.served[action.name]
        return True


names = st.sampled_from([A, B, C])
adapters = st.dictionaries(names, st.sampled_from(["/1", "/2"]), max_size=3)


@given(
    started_with=adapters,
    wishes=st.lists(adapters, min_size=1, max_size=5),
    faults=st.lists(st.booleans(), max_size=12),
    prune=st.booleans(),
    restart_after=st.integers(0, 6),
)
def test_once_faults_end_the_wanted_adapters_are_served(
    started_with: dict[AdapterName, str],
    wishes: list[dict[AdapterName, str]],
    faults: list[bool],
    prune: bool,  # noqa: FBT001  # hypothesis passes it by name
    restart_after: int,
) -> None:
    server, history, rng, now = (
        PretendServer(dict(started_with)),
        dict[AdapterName, Record](),
        random.Random(1),
        0.0,
    )
    pending = list(faults)
    for number, wanted in enumerate(wishes):
        if number == restart_after:
            server.served = dict(started_with)
        for _ in range(40):
            history = observed(history, wanted=wanted, served=server.served)
            for action in plan(wanted, server.served, history, now=now, prune=prune):
                if pending and pending.pop():
                    history[action.name] = failed(
                        history.get(action.name), action, error="x", now=now, backoff=BACKOFF, rng=rng
                    )
                else:
                    server.do(action)
                    history[action.name] = succeeded(action)
            now += 61.0
        lines = status(wanted, server.served, history, now=now, prune=prune)
        conflicts = {line.name for line in lines if line.state == "conflict"}
        assert {line.state for line in lines} <= {"loaded", "foreign", "conflict"}
        if prune:
            assert server.served == wanted
        else:
            assert conflicts <= started_with.keys()
            assert all(server.served[name] == path for name, path in wanted.items() if name not in conflicts)
            assert all(server.served[name] == path for name, path in started_with.items())


def test_the_adapter_file_in_the_docs_can_be_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[5] / "docs" / "vllm-pods.md").read_text()
    file = tmp_path / "adapters.yaml"
    file.write_text(page.rpartition("```yaml\n")[2].partition("```")[0])
    assert list(read_adapters(file)) == ["sql", "legal"]
