"""`make size`: how large the house is, beside its targets and limits.

Lines are all lines of all files, data and templates included. A limit is a little above the last count, so
that weight cannot come back unseen (`tests/unit/test_size.py`). Whoever takes lines away lowers the limit
here. Raising one needs a reason in the commit.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
LIMITS: Final[dict[str, tuple[int, int]]] = {
    "lines of epp": (30_000, 30_000),
    "lines of model_server": (12_500, 12_500),
    "lines of bench": (13_000, 12_980),
    "lines of tests": (68_000, 68_000),
    "lines of docs": (5_500, 5_500),
    "packages and modules at the top of epp": (10, 10),
    "class names of epp with two meanings": (0, 0),
    "constants of scheduling, endpoints, server_caches": (40, 40),
}
"""What is counted, with the target and the limit of today."""


def sources(place: str) -> list[Path]:
    """Return the files of a folder, without what Python and compilers write there."""
    found = [_ROOT / place, *(_ROOT / place).rglob("*")]
    return [path for path in found if path.is_file() and path.suffix not in {".pyc", ".so"}]


def _lines(folder: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in sources(folder))


def _at_the_top() -> int:
    inside = {path.relative_to(_ROOT / "epp").parts[0] for path in sources("epp")}
    return len(inside - {"__init__.py", "__main__.py", "py.typed"})


def _bodies(*places: str) -> Iterator[list[ast.stmt]]:
    for place in places:
        for path in sources(place):
            if path.suffix == ".py":
                yield ast.parse(path.read_text()).body


def _doubled_classes() -> int:
    """Count the names that stand for several classes or type aliases. `_Name` is the same as `Name`."""
    names = Counter[str]()
    for node in chain.from_iterable(_bodies("epp")):
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        found = [str(getattr(at, "name", getattr(at, "id", ""))).lstrip("_") for at in targets]
        names.update(name for name in found if name[:1].isupper() and not name.isupper())
    return sum(count > 1 for count in names.values())


def _constants() -> int:
    """Count the names in capitals that these modules give a value."""
    found = 0
    for body in _bodies("epp/picker/scheduling", "epp/picker/endpoints", "epp/picker/server_caches.py"):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found += sum(isinstance(target, ast.Name) and target.id.isupper() for target in targets)
    return found


def counts() -> dict[str, int]:
    """Return the counts, by the names of `LIMITS`."""
    found = [_lines(folder) for folder in ("epp", "model_server", "bench", "tests", "docs")]
    return dict(zip(LIMITS, [*found, _at_the_top(), _doubled_classes(), _constants()], strict=True))


def main() -> None:
    print(f"{'':<50} {'now':>7} {'limit':>7} {'target':>7}")
    for name, count in counts().items():
        target, limit = LIMITS[name]
        print(f"{name:<50} {count:>7,} {limit:>7,} {target:>7,}")


if __name__ == "__main__":
    main()
