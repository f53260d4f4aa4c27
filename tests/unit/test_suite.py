"""The run of all tests in parts: tests that fail run once more, and the table names them."""

import re
import tomllib
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.suite import PARTS, PLACES, PROCESS_FOLDERS, Outcome, Part, Report, run_part, table

_FLAKY = """
from pathlib import Path

def test_passes_the_second_time():
    mark = Path({mark!r})
    seen = mark.exists()
    mark.touch()
    assert seen

def test_passes(): pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build/tests").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each start takes a second
    return tmp_path


def _part(text: str, folder: Path) -> Part:
    (folder / "test_it.py").write_text(text)
    return Part(
        name="one", about="a part", folders=("test_it.py",), marks="", options=("-q", "-p", "no:randomly")
    )


def test_a_test_that_fails_once_passes_and_is_named(folder: Path) -> None:
    outcome = run_part(_part(_FLAKY.format(mark=str(folder / "mark")), folder), built=None)
    assert (outcome.status, outcome.first.tests, outcome.failed) == (0, 2, [])
    assert outcome.second_run == ["test_it::test_passes_the_second_time"]
    assert "needed a second run, a fault to repair: test_it::test_passes_the_second_time" in table(
        [outcome], seconds=1.0
    )


def test_a_part_without_tests_fails(folder: Path) -> None:
    outcome = run_part(_part("", folder), built=None)
    assert outcome.status != 0


def test_the_table_adds_up() -> None:
    outcomes = [Outcome(part, seconds=60.0, first=Report(tests=10, skipped=1)) for part in PARTS]
    # Several parts ran at a time, so the whole took less than the sum of the parts.
    total = table(outcomes, seconds=150.0).splitlines()[-1].split()
    assert total == ["all", str(10 * len(PARTS)), str(len(PARTS)), "2.5"]


def test_every_test_belongs_to_one_part() -> None:
    """The test uses the parts' own expressions, over all combinations of the markers that a folder may
    have.
    """
    folders = {folder for allowed in PLACES.values() for folder in allowed}
    for folder in ("tests/unit", *folders):
        may = [marker for marker, allowed in PLACES.items() if folder in allowed]
        for number in range(2 ** len(may)):
            has = {marker for place, marker in enumerate(may) if number >> place & 1}
            if folder in PROCESS_FOLDERS:
                has.add("processes")  # by tests/conftest.py, which refuses the next ones
            if not ("core" in has and has & {"vllm", "cluster"}):
                assert len(_parts_of(folder, has)) == 1, (folder, has)


def _parts_of(folder: str, has: set[str]) -> list[str]:
    def holds(name: str, /, **_: str | int | bool | None) -> bool:
        return name in has

    return [
        part.name
        for part in PARTS
        if (folder in part.folders if part.folders else f"--ignore={folder}" not in part.options)
        and Expression.compile(part.marks).evaluate(holds)
    ]


def test_every_test_file_is_in_a_folder_where_pytest_looks() -> None:
    """The tests of bench/ once did not run for days, and with them the short form of `make soak`."""
    root = Path(__file__).parents[2]
    config = tomllib.loads((root / "pyproject.toml").read_text())
    places = config["tool"]["pytest"]["ini_options"]["testpaths"]
    files = [
        path.relative_to(root)
        for folder in ("bench", "epp", "model_server", "tests", "deploy")
        for path in (root / folder).rglob("test_*.py")
    ]
    assert len(files) > 300
    assert [path for path in files if path.parts[0] not in places] == []


def test_every_test_name_is_a_claim_of_at_most_70_characters() -> None:
    root = Path(__file__).parents[2]
    named = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)
    names = {
        name
        for folder in ("bench", "tests")
        for path in (root / folder).rglob("test_*.py")
        for name in named.findall(path.read_text())
    }
    assert len(names) > 1000
    assert sorted(name for name in names if len(name) > 70) == []
