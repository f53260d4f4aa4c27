"""Runs the same load by one routing rule and then by another, on one gateway that stays up, as an operator
would.

It changes the rule in the picker's policy file while the picker runs. Everything else in the file stays, and
afterwards the file is as before. Each run starts with cold caches: it has a `cache_salt` of its own, and the
model servers have to empty their caches if their addresses are known (vLLM does this in its development
mode).
"""

from __future__ import annotations

import json
import random
import string
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from bench.load.figures import RunRecord
from bench.load.probe import LoadError
from bench.load.report import page
from bench.load.run import Plan, run

_IN_USE_WITHIN_S: Final = 30.0
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Gateway:
    """The addresses and files of a gateway that a comparison needs."""

    url: str
    admin: str
    """The picker's admin address, which shows the rule in use."""
    policy_file: Path
    servers: Sequence[str]
    """The model servers whose caches are emptied. If there are none, only the salts keep the runs apart."""


def compare(plan: Plan, gateway: Gateway, *, rules: Sequence[str]) -> list[RunRecord]:
    """Run `plan` by each rule, in this order, with one report in its directory. Raise LoadError if the picker
    does not start to use a rule.
    """
    records = []
    with _policy(gateway.policy_file) as document:
        for rule in rules:
            _use(gateway, document, rule)
            _forget(gateway.servers)
            salt = f"{rule}-{''.join(random.SystemRandom().choices(string.ascii_lowercase, k=8))}"
            print(f"  {rule} ...", flush=True)
            records.append(run(replace(plan, label=rule, salt=salt, directory=plan.directory / rule)))
    links = [(f"{rule}: report", f"{rule}/report.html") for rule in rules]
    title = f"{plan.scenario}: {' and '.join(rules)}"
    (plan.directory / "report.html").write_text(page(records, title=title, links=links))
    return records


@contextmanager
def _policy(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the current policy. It is written back afterwards."""
    try:
        before = file.read_text()
        document = yaml.safe_load(before)
        document["spec"]["rule"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise LoadError(f"{file} is no policy file of the picker: {error!r}") from error
    try:
        yield document
    finally:
        _write(file, before)


def _use(gateway: Gateway, document: dict[str, Any], rule: str) -> None:
    """Rewrite the policy file and wait until the picker reports the rule."""
    _write(gateway.policy_file, yaml.safe_dump({**document, "spec": {**document["spec"], "rule": rule}}))
    deadline = time.monotonic() + _IN_USE_WITHIN_S
    seen = ""
    while seen != rule:
        if time.monotonic() > deadline:
            raise LoadError(
                f"the picker at {gateway.admin} still uses {seen or 'a policy that it does not state'} instead of {rule}. Does it read {gateway.policy_file}, and does it know this rule? Its log says so."
            )
        seen = _rule_in_use(gateway.admin)
        if seen != rule:
            time.sleep(_LOOK_S)


def _rule_in_use(admin: str) -> str:
    try:
        with urllib.request.urlopen(f"{admin}/policy", timeout=10) as response:
            return str(json.loads(response.read())["spec"]["rule"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"the picker's admin address {admin} does not state its policy: {error}") from error


def _forget(servers: Sequence[str]) -> None:
    for url in servers:
        request = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
        try:
            urllib.request.urlopen(request, timeout=30).close()
        except urllib.error.HTTPError as error:
            raise LoadError(
                f"{url} does not reset its prefix cache (status {error.code}): vLLM does with VLLM_SERVER_DEV_MODE=1. "
                "Or leave --server out: each run has a cache_salt of its own, so runs share no cached prefix anyway"
            ) from error
        except OSError as error:
            raise LoadError(f"{url} does not answer: {error}") from error


def _write(file: Path, text: str) -> None:
    """Write the file by rename, so that the picker never reads half of the file."""
    fresh = file.with_suffix(".load")
    fresh.write_text(text)
    fresh.replace(file)
