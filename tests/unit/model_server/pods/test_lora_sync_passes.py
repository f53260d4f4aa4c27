"""lora-sync pass by pass, with a server that fails when the test says so."""

import random
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from model_server.pods.lora_sync import Action, Adapters, AdapterServer, LoraSync, ServerError
from tests.harness.clock import Clock


class PretendServer(AdapterServer):
    """Keeps the adapters that it started with until it is asked to unload them."""

    def __init__(self, served: Mapping[str, str]) -> None:
        self.url = "http://pretend"
        self.served = dict(served)
        self.faults: list[bool] = []
        self.asked: list[Action] = []

    async def adapters(self) -> Adapters:
        return dict(self.served)

    async def do(self, action: Action) -> None:
        self.asked.append(action)
        if self.faults and self.faults.pop():
            raise ServerError("no files")
        if action.verb == "load":
            assert action.name not in self.served, "loaded over another adapter"
            self.served[action.name] = action.path
        else:
            del self.served[action.name]


class Site:
    def __init__(self, folder: Path, served: Mapping[str, str] = {}, *, prune: bool = False) -> None:
        self.file, self.server, self.clock = folder / "adapters.yaml", PretendServer(served), Clock(100.0)
        self.sync = LoraSync(
            file=self.file, server=self.server, clock=self.clock, rng=random.Random(1), prune=prune
        )

    async def want(self, **adapters: str) -> list[Action]:
        """Make a pass with this file. Return what was asked of the server."""
        self.file.write_text(
            yaml.safe_dump({"adapters": [{"name": n, "path": p} for n, p in adapters.items()]})
        )
        self.server.asked.clear()
        await self.sync.sync()
        return list(self.server.asked)

    def lines(self) -> dict[str, tuple[str, str | None]]:
        return {line["name"]: (line["state"], line["error"]) for line in self.sync.status()["adapters"]}


async def test_missing_adapters_are_loaded_and_only_ours_are_unloaded(tmp_path: Path) -> None:
    site = Site(tmp_path, {"b": "/b"})
    assert await site.want(a="/a", b="/b") == [Action("load", "a", "/a")]
    assert await site.want(c="/c") == [Action("unload", "a", "/a"), Action("load", "c", "/c")]
    assert site.lines() == {"c": ("loaded", None), "b": ("foreign", None)}
    assert site.sync.in_sync


async def test_another_path_unloads_ours_first_and_is_a_conflict_for_others(tmp_path: Path) -> None:
    site = Site(tmp_path, {"theirs": "/1"})
    await site.want(ours="/1")
    wanted = {"ours": "/2", "theirs": "/2"}
    assert await site.want(**wanted) == [Action("unload", "ours", "/1"), Action("load", "ours", "/2")]
    state, error = site.lines()["theirs"]
    assert (state, "/1" in str(error), site.sync.in_sync) == ("conflict", True, False)
    pruning = Site(tmp_path, {"theirs": "/1", "more": "/m"}, prune=True)
    await pruning.want(theirs="/2")
    assert pruning.server.served == {"theirs": "/2"}


async def test_a_failed_load_waits_ever_longer_but_a_changed_path_does_not(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.server.faults = [True] * 3
    load = Action("load", "a", "/a")
    for longest in (1.0, 2.0, 4.0):
        assert await site.want(a="/a") == [load]
        assert site.lines() == {"a": ("failed", "no files")}
        site.clock.now += longest / 2 - 0.01
        assert await site.want(a="/a") == []
        site.clock.now += longest / 2 + 0.01
    site.server.faults = [True]
    assert await site.want(a="/a") == [load]
    assert await site.want(a="/other") == [Action("load", "a", "/other")]
    assert site.sync.in_sync


async def test_adapters_that_a_restarted_server_lost_are_loaded_again(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.want(a="/a", b="/b")
    site.server.served = {"b": "/theirs"}
    await site.want(a="/a")
    assert site.server.served == {"a": "/a", "b": "/theirs"}, "this one is not ours any more"


adapters = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from(["/1", "/2"]), max_size=3)


@given(
    started_with=adapters,
    wishes=st.lists(adapters, min_size=1, max_size=5),
    faults=st.lists(st.booleans(), max_size=12),
    prune=st.booleans(),
    restart_after=st.integers(0, 6),
)
async def test_once_faults_end_the_wanted_adapters_are_served(
    started_with: dict[str, str],
    wishes: list[dict[str, str]],
    faults: list[bool],
    prune: bool,  # noqa: FBT001  # hypothesis passes it by name
    restart_after: int,
) -> None:
    with TemporaryDirectory() as folder:
        site = Site(Path(folder), started_with, prune=prune)
        site.server.faults = faults
        for number, wanted in enumerate(wishes):
            if number == restart_after:
                site.server.served = dict(started_with)
            await site.want(**wanted)
            for _ in range(14):
                site.clock.now += 61.0
                await site.sync.sync()
            site.clock.now += 61.0
            conflicts = {name for name, (state, _) in site.lines().items() if state == "conflict"}
            assert {state for state, _ in site.lines().values()} <= {"loaded", "foreign", "conflict"}
            served = site.server.served
            if prune:
                assert served == wanted
            else:
                assert conflicts <= started_with.keys()
                assert all(served[name] == path for name, path in wanted.items() if name not in conflicts)
                assert all(served[name] == path for name, path in started_with.items())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "cannot be read"),
        (b"\xff", "not YAML"),
        (b"adapters: [", "not YAML"),
        (b"adapters", "Expected `object`"),
        (b"adapters: [{name: a}]", "missing required field"),
        (b"adapters: [{name: a, path: ''}]", "needs a name and a path"),
        (b"adapters: [{name: a, path: /1}, {name: a, path: /2}]", "twice"),
    ],
)
async def test_a_file_that_cannot_be_used_leaves_the_last_one_in_force(
    tmp_path: Path, answer: bytes | None, message: str
) -> None:
    site = Site(tmp_path)
    await site.want(a="/a")
    site.file.unlink()
    if answer is not None:
        site.file.write_bytes(answer)
    site.server.served = {}
    await site.sync.sync()
    assert site.server.served == {"a": "/a"}
    assert not site.sync.in_sync
    assert str(site.file) in site.sync.status()["file_error"]
    assert message in site.sync.status()["file_error"]
    await site.want(a="/a")
    assert site.sync.in_sync
