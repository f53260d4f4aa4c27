"""The modules that setup.py gives to mypyc keep their meaning when compiled, and a checkout is never
compiled in place.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from epp.serve import process

ROOT = Path(__file__).parents[2]
MODULES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["prefix-gateway"][
    "compiled"
]


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())


@pytest.mark.parametrize("module", MODULES)
def test_no_class_has_options_that_mypyc_drops(module: str) -> None:
    """mypyc drops the option of `class Prompt(Struct, frozen=True)`, so anyone could change a prompt. The
    option of a base stays if the base is not compiled, like those in `epp.types`.
    """
    classes = [node for node in ast.walk(_tree(module)) if isinstance(node, ast.ClassDef)]
    for name in [each.name for each in classes if each.keywords]:
        made = getattr(importlib.import_module(module), name)
        assert made.__base__.__module__ not in MODULES
        assert _options(made) == _options(made.__base__)
    assert "kw_only" not in {option.arg for each in classes for option in each.keywords}  # never inherited


def _options(struct: type[msgspec.Struct]) -> dict[str, object]:
    config = struct.__struct_config__
    return {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}


@pytest.mark.parametrize("module", MODULES)
def test_no_name_is_bound_to_errors_of_several_types(module: str) -> None:
    """mypyc gives the name of the second `except ... as error` the type of the first. That raises a
    TypeError.
    """
    for function in ast.walk(_tree(module)):
        if isinstance(function, ast.FunctionDef):
            caught = [
                each for each in ast.walk(function) if isinstance(each, ast.ExceptHandler) and each.name
            ]
            ours = {
                (each.name, ast.unparse(each.type))
                for each in caught
                if each.type and _is_ours(module, each.type)
            }
            assert len({name for name, _ in ours}) == len(ours), function.name


def _is_ours(module: str, error: ast.expr) -> bool:
    found = [
        getattr(importlib.import_module(module), each.id, None)
        for each in ast.walk(error)
        if isinstance(each, ast.Name)
    ]
    return any(isinstance(each, type) and each.__module__.startswith("epp.") for each in found)


@pytest.mark.parametrize("module", MODULES)
def test_no_annotation_is_read_at_run_time(module: str) -> None:
    """mypyc keeps only `int` of `Annotated[int, counter(...)]`, so the metric would be missing on the
    page.
    """
    assert not [
        node for node in ast.walk(_tree(module)) if isinstance(node, ast.Name) and node.id == "Annotated"
    ]


@pytest.mark.parametrize("module", MODULES)
def test_no_function_calls_itself(module: str) -> None:
    """C does not count the depth of calls. Input that drives the recursion would end the process."""
    tree = _tree(module)
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            assert function.name not in _called(function)
    methods = (part for each in tree.body if isinstance(each, ast.ClassDef) for part in each.body)
    for method in methods:
        if isinstance(method, ast.FunctionDef):
            assert f"self.{method.name}" not in _called(method)


def _called(function: ast.FunctionDef) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}


def test_the_module_that_shows_whether_the_package_is_compiled_is_compiled() -> None:
    assert process.HOT_MODULE in MODULES


def test_an_editable_install_is_never_compiled() -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "editable_wheel"],
        cwd=ROOT,
        env={**os.environ, "PREFIX_GATEWAY_COMPILE": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "not for editable installs" in done.stderr
