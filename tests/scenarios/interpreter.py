"""Runs a scenario: a text file of commands to a picker, each followed by the answer that it must give.

A file is a sequence of blocks, separated by empty lines. A block is any number of comment lines (`#`),
command lines, a line `----`, and the output of those commands. Sizes of prompts are in tokens (four bytes
each, as a fresh picker assumes). `system:1000+user:200` is 1,000 tokens of one text and 200 tokens of
another. An endpoint's name is one word. Words such as `model=m` are options. The commands are the methods
`do_...` below.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from epp.base.errors import NoEndpointError
from epp.base.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import API_VERSION, DEFAULT_POLICY, KIND, Policy
from epp.picker.decision import Candidate, Question
from epp.picker.events import Pick
from epp.picker.picker import Picker
from tests.invariants.picker import check_picker

_BYTES_PER_TOKEN = 4


def run(text: str) -> str:
    """Return the scenario with the outputs that the picker really gives."""
    world, blocks = World(), []
    for block in text.strip().split("\n\n"):
        given, _, _ = block.partition("\n----")
        commands = [line for line in given.splitlines() if line and not line.startswith("#")]
        output = [line for command in commands for line in world.do(command)]
        blocks.append("\n".join([given, "----", *output]) if commands else given)
    return "\n\n".join(blocks) + "\n"


class World:
    """A picker, its clock, and the requests that are open, by name."""

    def __init__(self) -> None:
        self.now = 0.0
        self.picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
        self.requests: dict[str, Pick] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self.known: dict[str, Address] = {}
        """Every endpoint keeps its address when it leaves and comes back."""

    def do(self, line: str) -> list[str]:
        command, *rest = line.split()
        names = [word for word in rest if "=" not in word]
        options = dict(word.split("=", 1) for word in rest if "=" in word)
        output = list(getattr(self, f"do_{command}")(names, options))
        self.picker.housekeep(now=self.now)
        check_picker(self.picker)
        return output

    # -- the world -------------------------------------------------------------------------------------------

    def do_policy(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """`policy rule=affinity gain.minMatchTokens=64`: route by a spec in which these fields differ from
        the defaults.
        """
        self.picker.set_policy(_policy(options))
        yield "ok"

    def do_endpoints(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """`endpoints a b model=m adapters=x,y`: set the whole list. All endpoints have the same model and
        adapters.
        """
        for name in names:
            self.known.setdefault(name, Address(f"10.0.0.{len(self.known) + 1}", 8000))
        adapters = frozenset(filter(None, options.get("adapters", "").split(",")))
        self.endpoints = {
            name: Endpoint(
                EndpointName(name), self.known[name], model=options.get("model", ""), adapters=adapters
            )
            for name in names
        }
        self.picker.news.set_endpoints(list(self.endpoints.values()), now=self.now)
        yield "ok"

    def do_restart(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """`restart a`: the source reports another process under the same name and address."""
        for name in names:
            endpoint = self.endpoints[name]
            self.endpoints[name] = replace(endpoint, incarnation=endpoint.incarnation + "+")
        self.picker.news.set_endpoints(list(self.endpoints.values()), now=self.now)
        yield "ok"

    def do_advance(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """`advance 1.5s`: let time pass."""
        self.now += float(names[0].removesuffix("s"))
        yield f"at {self.now:g}s"

    def do_scrape(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """`scrape a b waiting=3 kv_usage=0.5`: take in one good page from each. `scrape a failed=3`: three
        pages could not be read.
        """
        failed = int(options.pop("failed", 0))
        values: dict[str, Any] = {"running": 0, "waiting": 0, "kv_usage": 0.0}  # as an idle server says
        values |= {key: msgspec.yaml.decode(text) for key, text in options.items()}
        for name in names:
            for _ in range(failed):
                self.picker.news.observe(EndpointName(name), None, now=self.now)
            if not failed:
                metrics = EndpointMetrics(scraped_at=self.now, **values)
                self.picker.news.observe(EndpointName(name), metrics, now=self.now)
        yield "ok"

    # -- requests --------------------------------------------------------------------------------------------

    def do_pick(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """`pick r1 prompt=system:1000+user:200 model=m salt=s subset=a,b`: pick for one request."""
        try:
            pick = self._pick(options)
        except NoEndpointError as error:
            yield f"{names[0]} refused: {error.status} {error.reason}"
            return
        self.requests[names[0]] = pick
        decision = pick.decision
        order = ",".join(str(self._name(address)) for address in pick.destinations)
        cached = f"{decision.matched_tokens} of {decision.prompt_tokens} tokens cached"
        yield f"{names[0]} -> {order} reason={decision.reason} {cached}"
        for candidate in decision.candidates:
            yield f"  {_shown(candidate, scored=decision.rule == 'least-cost')}"

    def do_burst(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """`burst 40 prompt=...`: send 40 requests at once, leave all open, and show where they went. `{i}`
        is the number.
        """
        counts: Counter[str] = Counter()
        for number in range(int(names[0])):
            numbered = {key: text.replace("{i}", str(number)) for key, text in options.items()}
            pick = self._pick(numbered)
            self.requests[f"burst{len(self.requests)}"] = pick
            counts[pick.decision.chosen] += 1
        yield " ".join(f"{name}={counts[name]}" for name in sorted(self.endpoints))

    def do_respond(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """`respond r1 status=200 served=a`: the response headers came."""
        served = self.known[options["served"]] if "served" in options else None
        status = int(options.get("status", 200))
        self.picker.on_response_headers(self.requests[names[0]], status=status, served=served, now=self.now)
        yield "ok"

    def do_end(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """`end r1 outcome=failed`: end one request. `end all`: end all."""
        outcome: Any = options.get("outcome", "ended")
        for name in list(self.requests) if names == ["all"] else names:
            self.picker.end(self.requests.pop(name), outcome=outcome, now=self.now)
        yield "ok"

    def do_serve(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """`serve prompt=...`: send a whole request. Its first choice answers at once."""
        pick = self._pick(options)
        self.picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=self.now)
        self.picker.end(pick, outcome="ended", now=self.now)
        yield f"by {pick.decision.chosen}"

    # -- table -----------------------------------------------------------------------------------------------

    def do_table(self, names: list[str], options: dict[str, str]) -> Iterator[str]:
        """Show how many tokens each server holds according to the table, guesses included."""
        for name in sorted(self.endpoints):
            mirror = self.picker.caches.table.mirrors[EndpointName(name)]
            yield f"{name} {(mirror.used_bytes + mirror.guessed_bytes) // _BYTES_PER_TOKEN} tokens"

    # -- parts -----------------------------------------------------------------------------------------------

    def _pick(self, options: dict[str, str]) -> Pick:
        return self.picker.pick(self._request(options), now=self.now)

    def _request(self, options: dict[str, str]) -> Question:
        inference = InferenceRequest(
            kind=ApiKind.COMPLETIONS,
            model=options.get("model", "m"),
            prompt=_text(options.get("prompt", "")),
            cache_salt=options.get("salt", ""),
        )
        subset = options.get("subset")
        return Question(
            request_id="scenario",
            inference=inference,
            subset=frozenset(self.known[n] for n in subset.split(",")) if subset else None,
        )

    def _name(self, address: Address) -> EndpointName:
        return next(EndpointName(name) for name, known in self.known.items() if known == address)


def _policy(options: dict[str, str]) -> Policy:
    spec: dict[str, Any] = {}
    for path, text in options.items():
        *sections, field = path.split(".")
        holder = spec
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[field] = msgspec.yaml.decode(text)
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "scenario"}, "spec": spec}
    return msgspec.convert(document, Policy)


def _text(parts: str) -> bytes:
    """Return the text of `name:tokens+name:tokens`. A shorter text of a name is the beginning of a longer
    one.
    """
    prompt = b""
    for part in filter(None, parts.split("+")):
        name, _, tokens = part.partition(":")
        size = int(tokens) * _BYTES_PER_TOKEN
        prompt += (name.encode() * (size // len(name) + 1))[:size]
    return prompt


def _shown(candidate: Candidate, *, scored: bool) -> str:
    if candidate.excluded:
        return f"{candidate.name} left out: {candidate.excluded}"
    facts = f"matched={candidate.matched_tokens} in_flight={candidate.in_flight}"
    if not scored:
        return f"{candidate.name} {facts}"
    parts = " + ".join(f"{name} {value * 1000:.0f}" for name, value in candidate.parts_s.items() if value > 0)
    return f"{candidate.name} {facts} cost {candidate.score_s * 1000:.0f} ms" + (
        f" = {parts}" if parts else ""
    )
