"""The error for a launch profile. The error lists all problems at once, each with its reason and a correct
setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    where: str
    """The field, as it is written in the file."""
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why} Instead: {self.instead}"


class ProfileError(Exception):
    """The profile cannot be read, or would break routing."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)
