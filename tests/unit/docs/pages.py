"""README, CONTRIBUTING, the pages of docs and the pages of the charts. They are cut into the parts that the
tests of this folder check: links, commands, names.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[3]

_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE: Final = re.compile(r"`([^`\n]+)`")
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(REPOSITORY))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """Return language and text of each fenced block."""
        return _FENCE.findall(self.text)

    @cached_property
    def prose(self) -> str:
        """Return the page without its fenced blocks."""
        return _FENCE.sub("", self.text)

    @cached_property
    def spans(self) -> list[str]:
        """Return the texts between backticks on one line."""
        return _CODE.findall(self.prose)

    @cached_property
    def links(self) -> list[str]:
        """Return the targets of links, except links to the web."""
        without_code = _CODE.sub("", self.prose)
        return [target for target in _LINK.findall(without_code) if "://" not in target]

    @cached_property
    def anchors(self) -> set[str]:
        """Return the names that `#...` may have here, as GitHub makes them from headings."""
        return {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in _HEADING.findall(self.prose)
        }

    @cached_property
    def commands(self) -> list[str]:
        """Return the lines of blocks and spans that a shell would accept, without comments and `...`."""
        lines = [line for _, block in self.blocks for line in block.splitlines()]
        return [re.split(r"\s#\s|\s#$", line)[0].strip() for line in (*lines, *self.spans)]


PAGES: Final = [
    Page(path)
    for path in (
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        *sorted((REPOSITORY / "docs").glob("*.md")),
        *sorted((REPOSITORY / "docs" / "decisions").glob("*.md")),
        *sorted((REPOSITORY / "deploy" / "helm").glob("*/README.md")),
    )
]
