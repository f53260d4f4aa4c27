"""README and docs name things that exist: links, files, Make targets, modules."""

import re
from typing import Final

import pytest

from tests.unit.docs.pages import PAGES, REPOSITORY, Page

MAKEFILE: Final = (REPOSITORY / "Makefile").read_text()
TARGETS: Final = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
EACH: Final = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

_PATH: Final = re.compile(r"(?<![\w/.$-])((?:docs|deploy|tests|epp|model_server)/[\w./*{},-]*[\w*}/])")
_MAKE: Final = re.compile(r"(?:^|\s)make ([a-z][a-z-]*)")


@EACH
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Page) -> None:
    for target in page.links:
        file, _, anchor = target.partition("#")
        found = (page.path.parent / file).resolve() if file else page.path
        assert found.exists(), target
        if anchor:
            assert anchor in Page(found).anchors, target


@EACH
def test_prose_is_at_most_110_columns_wide(page: Page) -> None:
    """Ruff checks comments and docstrings (W505). Tables, headings, pictures and long code spans may stay
    on one line.
    """
    for line in page.prose.splitlines():
        if not line.lstrip().startswith(("|", "#", "![", "<")) and not line.startswith("    "):
            assert len(re.sub(r"`[^`]{40,}`?", "", line)) <= 110, line


@EACH
def test_every_file_that_is_named_exists(page: Page) -> None:
    for found in _PATH.findall(page.text):
        for path in braces(found):
            numbered = f"{path}-*" if re.fullmatch(r"docs/decisions/\d{4}", path) else path
            assert list(REPOSITORY.glob(numbered.rstrip("/"))), path


@EACH
def test_every_make_target_that_is_named_exists(page: Page) -> None:
    for target in _MAKE.findall("\n".join(page.commands)):
        assert target in TARGETS, target


def test_every_page_is_listed_in_the_index() -> None:
    index = next(each for each in PAGES if each.name == "docs/README.md")
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
    assert pages - set(index.links) == set()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    site = (REPOSITORY / "mkdocs.yml").read_text()
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")}
    assert pages - set(re.findall(r"[\w-]+\.md", site)) == set()


def test_the_front_page_has_600_to_900_words() -> None:
    assert 600 <= len((REPOSITORY / "README.md").read_text().split()) <= 900


def test_every_target_is_explained_by_make_help() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.MULTILINE))
    explained = set(re.findall(r"^([a-z][a-z-]*):.*## ", MAKEFILE, re.MULTILINE))
    assert targets - explained == {"fetch-model"}, "a part of `make run`"


def test_the_targets_that_take_arguments_are_listed() -> None:
    recipes = re.findall(r"^([a-z][a-z-]*):.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    take = {name for name, recipe in recipes if "ARGS" in recipe}
    page = next(each for each in PAGES if each.name == "docs/testing.md").prose
    sentence = re.search(r'^`ARGS="\.\.\."` goes on(.*?)\.\n', page, re.DOTALL | re.MULTILINE)
    assert sentence is not None
    assert set(re.findall(r"`([a-z-]+)`", sentence[1])) == take


def test_every_module_that_the_architecture_names_exists() -> None:
    text = next(each for each in PAGES if each.name == "docs/architecture.md").text
    modules = {path.stem for top in ("epp", "model_server") for path in (REPOSITORY / top).rglob("*.py")}
    for file in re.findall(r"`(?:\w+/)*(\w+)\.py`", text):
        assert file in modules, file


def braces(path: str) -> list[str]:
    """Return the paths that a pattern stands for: `a/{b,c}.py` stands for two."""
    inside = re.search(r"\{([^}]*)\}", path)
    if inside is None:
        return [path]
    return [path.replace(inside[0], each) for each in inside[1].split(",")]
