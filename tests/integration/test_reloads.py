"""Files that change while a picker runs. A file that is refused changes nothing."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.gateway import Gateway, running_gateway, write_endpoints, write_policy
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy

PROMPT = "a prompt long enough for several chunks " * 60


async def decided(gateway: Gateway, request_id: str) -> dict[str, Any]:
    """Return the decision about one more request with the same prompt."""
    reply = await gateway.client.complete(PROMPT, headers={"x-request-id": request_id})
    assert reply.status == 200
    decision = await gateway.picker.decision(request_id)
    assert decision is not None
    return decision


async def shown(gateway: Gateway, series: str, *, what: str) -> None:
    """Wait until the picker's metrics have a line."""

    async def reported() -> bool:
        return series in (await gateway.picker.metrics()).splitlines()

    await wait_until(reported, what=what)


async def reload_ok(gateway: Gateway, source: str, expected: float) -> None:
    """Wait until the newest content of the file is in use (1) or is refused (0)."""
    what = f"the {source} file is {'taken' if expected else 'refused'}"
    await shown(gateway, f'epp_reload_ok{{source="{source}"}} {expected}', what=what)


async def policy_in_use(gateway: Gateway, *, policy: str, rule: str) -> None:
    series = f'epp_policy_info{{policy="{policy}",rule="{rule}"}} 1.0'
    await shown(gateway, series, what=f"policy {policy} is in use")


@pytest.mark.core
async def test_a_picker_with_a_refused_policy_starts_on_the_default(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, policy={"rule": "fastest"}) as gateway:
        await policy_in_use(gateway, policy="default", rule="least-cost")
        await reload_ok(gateway, "policy", 0.0)
        assert (await gateway.client.complete(PROMPT)).status == 200
        log = gateway.picker.process.tail()
        assert "the default policy is used until this policy file is corrected" in log
        assert "fastest" in log
        write_policy(gateway.config, {"rule": "affinity"}, name="mended")
        await policy_in_use(gateway, policy="mended", rule="affinity")
        await reload_ok(gateway, "policy", 1.0)


@pytest.mark.core
async def test_a_new_policy_keeps_the_table_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, policy={"rule": "least-cost"}) as gateway:
        first = await decided(gateway, "first")
        entries = await gateway.picker.metric("epp_table_size_entries")
        assert entries > 0

        write_policy(gateway.config, {"rule": "affinity"}, name="second")
        await policy_in_use(gateway, policy="second", rule="affinity")
        assert await gateway.picker.metric("epp_table_size_entries") == entries
        second = await decided(gateway, "second")
        assert (second["policy"], second["rule"], second["reason"]) == ("second", "affinity", "prefix")
        assert second["chosen"] == first["chosen"]

        write_policy(gateway.config, {"rule": "the-best"}, name="third")
        await reload_ok(gateway, "policy", 0.0)
        third = await decided(gateway, "third")
        assert (third["policy"], third["rule"], third["chosen"]) == ("second", "affinity", first["chosen"])
        assert "spec.rule" in gateway.picker.process.tail()


async def test_endpoints_come_into_use_once_envoys_file_can_be_written_again(tmp_path: Path) -> None:
    """A folder that is no folder stands for a full or read-only disk: each fails a write with an OSError."""
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    async with running_gateway(tmp_path, backends=2, envoy={"edsFile": str(folder / "eds.json")}) as gateway:
        folder.rename(away)
        folder.write_text("not a folder")
        write_endpoints(gateway.config, gateway.backends[:1])
        await gateway.picker.process.wait_printed("cannot be used yet; will try again")
        assert (await gateway.client.complete(PROMPT)).status == 200
        folder.unlink()
        away.rename(folder)
        await gateway.envoy.wait_endpoints({str(gateway.backends[0].address)})
        await reload_ok(gateway, "endpoints", 1.0)
