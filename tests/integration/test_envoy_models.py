"""Several models behind one real Envoy and one real picker. The picker asks the servers which models they
have.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy


async def all_listed(gateway: Gateway) -> None:
    """Wait until every server has answered which models it has."""

    async def all_known() -> bool:
        return await gateway.picker.metric("epp_endpoints_without_model_list") == 0

    await wait_until(all_known, what="every server has listed its models")


async def test_the_model_chooses_the_servers_and_an_unknown_model_is_404(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, backends=3) as gateway:
        for backend, name in zip(gateway.backends, ("m", "n", "n"), strict=True):
            backend.models = [{"id": name, "max_model_len": 4096}, {"id": f"{name}-sql", "parent": name}]
        await all_listed(gateway)
        for model, servers in {"m": {"s0"}, "m-sql": {"s0"}, "n": {"s1", "s2"}}.items():
            replies = [await gateway.client.complete(f"prompt {n}", model=model) for n in range(6)]
            assert [reply.status for reply in replies] == [200] * 6
            assert {reply.served_by for reply in replies} <= servers
        unknown = await gateway.client.complete(model="ghost")
        assert unknown.status == 404
        assert json.loads(unknown.body)["error"]["code"] == "model_not_found"
        assert not any(
            b"ghost" in request.body for backend in gateway.backends for request in backend.prompts
        )
        listed = await gateway.client.get("/v1/models")
        assert listed.headers["content-type"] == "application/json"
        assert [card["id"] for card in json.loads(listed.body)["data"]] == ["m", "m-sql", "n", "n-sql"]


async def test_a_canary_gets_its_share_of_an_alias_in_the_body_itself(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, backends=2) as gateway:
        stable, canary = gateway.backends
        stable.models, canary.models = [{"id": "llama"}], [{"id": "llama-next"}]
        await all_listed(gateway)
        file = Path(gateway.config.endpoints_file)
        document = yaml.safe_load(file.read_text())
        targets = [{"model": "llama", "weight": 90}, {"model": "llama-next", "weight": 10}]
        document["rewrites"] = [{"models": ["gpt"], "targets": targets}]
        renamed = file.with_suffix(".new")
        renamed.write_text(yaml.safe_dump(document))
        renamed.replace(file)

        async def listed() -> bool:
            reply = await gateway.client.get("/v1/models")
            return [card["id"] for card in json.loads(reply.body)["data"]] == ["gpt", "llama", "llama-next"]

        await wait_until(listed, what="the alias is known")
        replies = [
            await gateway.client.complete(f"prompt {n}", model="gpt", headers={"x-request-id": f"r{n}"})
            for n in range(200)
        ]
        assert {reply.status for reply in replies} == {200}
        for backend, model in ((stable, "llama"), (canary, "llama-next")):
            bodies = [json.loads(request.body) for request in backend.prompts]
            assert {body["model"] for body in bodies} == {model}
        seen = Counter(reply.served_by for reply in replies)
        # Three standard deviations of a binomial draw: sqrt(200 * .1 * .9) is 4.2.
        assert abs(seen[canary.name] - 20) <= 13
        decision = await gateway.picker.decision("r0")
        assert decision is not None
        assert decision["asked_model"] == "gpt"
