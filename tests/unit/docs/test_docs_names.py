"""Names in README and docs are the real names."""

import argparse
import json
import re
import shlex
from functools import cache
from typing import Any, Final

import msgspec
import pytest
import yaml

from epp.config.policy import PolicySpec
from epp.config.settings import Config
from epp.serve import cli as picker
from model_server import cli as server
from tests.reference.pages import METRICS
from tests.unit.docs.pages import PAGES, REPOSITORY, Page

EACH: Final = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

OTHER_DOTS: Final = (".py", ".yaml", ".md", ".json", "kubernetes.aio", "envoy.lb", ".subset_hint")
"""Ends of names with dots that are not fields: files, modules, metadata namespaces."""

OF_OTHERS: Final = {"helm", "kubectl", "docker", "git", "curl", "envoy", "vllm", "go", "uv", "pip"}
"""Programs whose flags this test does not check."""


# -- flags ---------------------------------------------------------------------------------------------------


def flags_of(parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Return the flags of each command. Flags without a command are under the empty name."""
    found: dict[str, set[str]] = {"": set()}
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of them
        found[""] |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - argparse has no public name for it
            for name, command in action.choices.items():
                found[name] = flags_of(command)[""]
    return found


PROGRAMS: Final = {"epp": flags_of(picker.command_line()), "model-server": flags_of(server.command_line())}


@cache
def texts_with_flags() -> str:
    """Return all text of the repository that may define a flag: programs, charts, Makefile."""
    files = [
        path
        for top in ("epp", "model_server", "bench", "tests", "deploy")
        for end in ("*.py", "*.yaml", "*.tpl", "*.sh", "*.Dockerfile")
        for path in (REPOSITORY / top).rglob(end)
        if "tests/unit/docs" not in str(path)
    ]
    return "\n".join(path.read_text(errors="replace") for path in files)


@cache
def flags_of_the_repository() -> frozenset[str]:
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", texts_with_flags()))


@EACH
def test_our_commands_accept_the_flags_that_a_page_gives_them(page: Page) -> None:
    for line in page.commands:
        program, *words = words_of(line)
        if program not in PROGRAMS:
            continue
        known = PROGRAMS[program]
        command = words[0] if words and not words[0].startswith("-") else ""
        if not re.fullmatch(r"[a-z-]*", command):  # a picture made of characters
            continue
        assert command in known, line
        for word in words:
            if re.match(r"--[a-z]", word):
                assert word.split("=")[0] in known.get(command, set()) | known[""], f"{word} in: {line}"


@EACH
def test_every_flag_that_is_named_belongs_to_a_program_of_this_repository(page: Page) -> None:
    for line in page.commands:
        if set(words_of(line)) & OF_OTHERS:
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+\w", line):
            assert flag in flags_of_the_repository(), f"{flag} in: {line}"


def words_of(line: str) -> list[str]:
    try:
        words = shlex.split(line.removeprefix("$ "))
    except ValueError:
        words = line.split()
    return words or [""]


# -- metrics -------------------------------------------------------------------------------------------------


def metrics() -> set[str]:
    found: set[str] = set()
    for spec in METRICS:
        found |= {spec.name, *(f"{spec.name}_{end}" for end in ("bucket", "sum", "count"))}
    return found


@EACH
def test_every_metric_of_the_picker_that_is_named_exists(page: Page) -> None:
    known = metrics()
    for name in re.findall(r"(?<![\w/.])epp_[a-z0-9_]+\*?", page.text):
        if name.endswith(("*", "_")):
            assert any(each.startswith(name.rstrip("*")) for each in known), name
        else:
            assert name in known, name


# -- fields --------------------------------------------------------------------------------------------------


def fields_of(struct: type[msgspec.Struct]) -> dict[str, object]:
    """Return the names as they are written. A section has its fields as its value, everything else None."""
    return _fields(msgspec.inspect.type_info(struct))


def _fields(node: msgspec.inspect.Type) -> dict[str, object]:
    while isinstance(node, msgspec.inspect.Metadata):
        node = node.type
    if isinstance(node, msgspec.inspect.UnionType):
        return {name: inner for each in node.types for name, inner in _fields(each).items()}
    if not isinstance(node, msgspec.inspect.StructType):
        return {}
    return {each.encode_name: _fields(each.type) or None for each in node.fields}


@cache
def trees() -> list[dict[str, object]]:
    """Return every tree of fields in which a dotted name on a page may start."""
    config, spec = fields_of(Config), fields_of(PolicySpec)
    schema = json.loads((REPOSITORY / "deploy/helm/model-server/values.schema.json").read_text())
    profile = _of_schema(schema["properties"]["profile"])
    assert isinstance(profile, dict)
    found: list[dict[str, object]] = [config, spec, {"spec": spec, "config": config}, profile]
    for chart in ("prefix-gateway", "model-server"):
        values = yaml.safe_load((REPOSITORY / "deploy" / "helm" / chart / "values.yaml").read_text())
        found.append({**values, "config": config, "policy": spec, "profile": profile})
    return found


def _of_schema(node: dict[str, Any]) -> dict[str, object] | None:
    """Return the fields of a JSON schema in the form of `fields_of`."""
    kinds = node.get("anyOf", [node])
    found: dict[str, object] = {
        name: _of_schema(each) for kind in kinds for name, each in kind.get("properties", {}).items()
    }
    return found or None


def is_a_field(dotted: str) -> bool:
    return any(_leads(tree, dotted.split(".")) for tree in trees())


def _leads(node: object, parts: list[str]) -> bool:
    if (
        not parts or not node
        # Either the name was found, or this is a list, a map of anything, or a plain value that a later
        # part indexes.
    ):
        return not parts or node == {}
    return isinstance(node, dict) and parts[0] in node and _leads(node[parts[0]], parts[1:])


@EACH
def test_every_field_that_is_named_exists_in_configuration_policy_or_chart(page: Page) -> None:
    tops = {name for tree in trees() for name, inner in tree.items() if isinstance(inner, dict)}
    for span in page.spans:
        dotted = re.fullmatch(r"([a-z]\w*(?:\.[a-z]\w*)+)(?:: .*)?", span)
        if dotted and dotted[1].split(".")[0] in tops and not dotted[1].endswith(OTHER_DOTS):
            assert is_a_field(dotted[1]), span


# -- upgrades ------------------------------------------------------------------------------------------------


def test_an_upgrade_in_the_docs_keeps_the_values_that_were_set() -> None:
    """With `--reuse-values`, a value that a new chart brings would be missing."""
    blocks = [text for page in PAGES for language, text in page.blocks if language in ("", "sh", "console")]
    upgrades = [line for block in blocks for line in block.splitlines() if "helm upgrade" in line]
    assert len(upgrades) >= 2
    assert [line for line in upgrades if "--reset-then-reuse-values" not in line] == []
    assert not any("--reuse-values" in block for block in blocks)
