"""`python -m tests.charts.values_table` writes the table of values in the README of each chart anew.

The table has the format of helm-docs. It comes from values.yaml: the comment above a value and the one behind
it are its description. A map on one line is one row. The schema says the type of a value that is null. `make
docs` runs this.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.charts.rendering import GATEWAY, MODEL_SERVER

HEAD: Final = "## Values\n"
_TYPES: Final = {bool: "bool", int: "int", float: "float", str: "string", list: "list", dict: "object"}
_STATED: Final = {"integer": "int", "array": "list"}
_Pairs = Sequence[tuple[yaml.ScalarNode, yaml.Node]]


def table(text: str, schema: Mapping[str, Any]) -> str:
    """Return the table of a values.yaml. schema: of the whole file."""
    lines, root = text.splitlines(), yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "values.yaml is a map"
    rows = [
        "| Key | Type | Default | Description |",
        "|-----|------|---------|-------------|",
        *_rows(root.value, lines, (), schema),
    ]
    return "\n".join(rows) + "\n"


def _rows(
    pairs: _Pairs, lines: Sequence[str], path: tuple[str, ...], schema: Mapping[str, Any]
) -> Iterator[str]:
    for key, value in pairs:
        here, description = (*path, key.value), _description(key, value, lines)
        stated = schema.get("properties", {}).get(key.value, {})
        block = isinstance(value, yaml.MappingNode) and not value.flow_style
        if not block or description:
            default = yaml.safe_load("".join(yaml.serialize(value)))
            kind = _TYPES.get(type(default)) or _STATED[stated["type"][0]]
            shown = "" if block else f"`{json.dumps(default)}`"
            cells = (".".join(here), kind, shown, description)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        if block:
            yield from _rows(value.value, lines, here, stated)


def _description(key: yaml.Node, value: yaml.Node, lines: Sequence[str]) -> str:
    above: list[str] = []
    row = key.start_mark.line - 1
    while row >= 0 and lines[row].lstrip().startswith("# "):
        above.insert(0, lines[row].lstrip()[2:])
        row -= 1
    inner = isinstance(value, yaml.MappingNode) and not value.flow_style
    mark = key.end_mark if inner else value.end_mark
    behind = lines[mark.line][mark.column :].lstrip(": ") if mark.line < len(lines) else ""
    return " ".join([*above, behind[2:] if behind.startswith("# ") else ""]).strip()


def written(chart: Path) -> str:
    """Return the README of a chart with its table."""
    before, _, _ = (chart / "README.md").read_text().partition(HEAD)
    schema = json.loads((chart / "values.schema.json").read_text())
    return f"{before}{HEAD}\n{table((chart / 'values.yaml').read_text(), schema)}"


if __name__ == "__main__":
    for each in (GATEWAY, MODEL_SERVER):
        (each / "README.md").write_text(written(each).rstrip("\n") + "\n")
