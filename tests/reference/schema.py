"""Describes the sections of the configuration and of the policy, for the reference pages and the Kubernetes
schema.
"""

import ast
import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec


def definitions(root: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the JSON schema of `root` and of every struct in it, by the name of the class."""
    _, found = msgspec.json.schema_components([root])
    base: Any = root.__base__  # all structs have the same base
    for section in base.__subclasses__():
        if section.__name__ in found:
            for field, text in _texts(section).items():
                found[section.__name__]["properties"][field]["description"] = text
    return found


def _texts(section: type[msgspec.Struct]) -> Mapping[str, str]:
    """Return the string below each field, in one line. Python drops such strings, so they are read in the
    source.
    """
    yaml_names = dict(zip(section.__struct_fields__, section.__struct_encode_fields__, strict=True))
    [tree] = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, below in pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[yaml_names[name]] = " ".join(text.split())
    return texts
