"""Adds flags in one form: the type of a value is that of its default, and the help names the default.
Callers: the modules of this package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

Group = argparse._ArgumentGroup  # noqa: SLF001 - argparse has no public name for it


def value(
    group: Group, flag: str, unit: str, meaning: str, *, default: object = None, kind: type = int
) -> None:
    """Add a flag with a value. Without a default the value is of `kind`, and `meaning` says what happens
    without the flag.
    """
    if default is not None:
        meaning, kind = f"{meaning} (default %(default)s)", type(default)
    group.add_argument(flag, type=kind, default=default, metavar=unit, help=meaning)


def choice(group: Group, flag: str, choices: Sequence[str], meaning: str) -> None:
    """Add a flag with a few values, the first of which is the default."""
    group.add_argument(flag, choices=choices, default=choices[0], help=f"{meaning} (default %(default)s)")


def switch(group: Group, flag: str, meaning: str) -> None:
    group.add_argument(flag, action="store_true", help=meaning)


def accepted(group: Group, flag: str, values: Sequence[str] | None) -> None:
    """Accept a flag of an earlier release with these values, or with any, and do nothing."""
    group.add_argument(flag, choices=values, help=argparse.SUPPRESS)
