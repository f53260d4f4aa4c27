"""Each addition that docs/contributing.md describes works, made in a copy by exactly these edits."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.request_path import Walk, walk

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "contributing.md").read_text()

Edit = tuple[str, str, str]
"""The file, the text to be replaced, and the new text."""

RULE: list[Edit] = [
    (
        "epp/picker/scheduling/rules.py",
        "RULES: Mapping[RuleName",
        (
            "class Last(Rule):\n    _last = ''\n\n"
            "    def committed(self, sent):\n        self._last = sent.server\n\n"
            "    def ended(self, sent, *, computed):\n        super().ended(sent, computed=computed)\n"
            "        self._last = self._last if computed else ''\n\n"
            "    def rank(self, weighed):\n"
            "        names = [weighed.seen.roster.names[slot] for slot in weighed.seen.slots]\n"
            "        return Choice(weighed, [names.index(self._last) if self._last in names else 0], 'last')\n\n\n"
            "RULES: Mapping[RuleName"
        ),
    ),
    (
        "epp/picker/scheduling/rules.py",
        '    "random": Random,\n',
        '    "random": Random,\n    "last": Last,\n',
    ),
    ("epp/config/policy.py", '    "random",\n]', '    "random",\n    "last",\n]'),
]
ENGINE: list[Edit] = [
    (
        "epp/sources/scraping/metric_names.py",
        '    "running": (\n',
        '    "running": (\n        "newengine:running",\n',
    ),
    ("epp/sources/scraping/metric_names.py", '(b"vllm:", ', '(b"newengine:", b"vllm:", '),
]
METRIC: list[Edit] = [
    (
        "epp/observe/telemetry/picker_state.py",
        '    scrape_error: str = ""\n',
        '    scrape_error: str = ""\n    slots: int = gauge("epp_endpoint_slots", "Slots for adapters.")\n',
    ),
    (
        "epp/serve/state_report.py",
        "                in_flight=state.in_flight,\n",
        "                in_flight=state.in_flight,\n                slots=7,\n",
    ),
]
FIELD: list[Edit] = [
    (
        "epp/config/policy.py",
        "class Gain(Strict, frozen=True):\n",
        'class Gain(Strict, frozen=True):\n    new_share: Ratio = 0.5\n    """A share."""\n',
    ),
    (
        "epp/picker/scheduling/schedule.py",
        "def over_limits(",
        "def new_share(spec):\n    return spec.gain.new_share\n\n\ndef over_limits(",
    ),
]
TRIALS: dict[str, tuple[list[Edit], str]] = {
    "a rule": (
        RULE,
        (
            "from epp.config.policy import check_spec\n"
            "from epp.picker.scheduling.rules import RULES\n"
            "from epp.picker.scheduling.schedule import Scheduler\n"
            "from epp.picker.scheduling.snapshot import SentPick\n"
            "from tests.unit.picker.scheduling.snapshots import SeenEndpoint, request_of, snapshot\n"
            "spec = check_spec({'rule': 'last'})\n"
            "scheduler = Scheduler(spec, RULES[spec.rule](spec, None))\n"
            "def first(waiting=0):\n"
            "    seen = [SeenEndpoint('a'), SeenEndpoint('b', waiting=waiting), SeenEndpoint('c')]\n"
            "    return scheduler.schedule(request_of(seen), snapshot(seen)).places[0]\n"
            "assert first() == 0\n"
            "scheduler.rule.committed(SentPick('b', 1.0))\n"
            "assert first() == 1, 'the rule remembers'\n"
            "assert first(waiting=1000) == 0, 'a load threshold narrows the candidates'\n"
            "scheduler.rule.ended(SentPick('b', 1.0), computed=False)\n"
            "assert first() == 0\n"
        ),
    ),
    "an engine": (
        ENGINE,
        (
            "from epp.sources.scraping.metrics_page import parse_page\n"
            "assert parse_page(b'newengine:running 3\\n', scraped_at=0.0).running == 3\n"
        ),
    ),
    "a metric of an endpoint": (
        METRIC,
        (
            "import epp.serve.state_report\n"
            "from epp.observe.telemetry.decisions import DecisionRing\n"
            "from epp.observe.telemetry.metrics import Metrics\n"
            "from tests.reference.pages import metrics_page\n"
            "from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus\n"
            "status = PickerStatus(endpoints=(EndpointStatus(name='a', address='h:1', slots=7),))\n"
            "metrics = Metrics(decisions=DecisionRing(maxlen=1), state=lambda: status)\n"
            "page = b''.join(metrics.pieces()).decode()\n"
            "assert 'epp_endpoint_slots{endpoint=\"a\"} 7.0' in page, page\n"
            "assert '| `epp_endpoint_slots` | gauge | `endpoint` | Slots for adapters. |' in metrics_page()\n"
        ),
    ),
    "a field of the policy": (
        FIELD,
        (
            "from epp.config.policy import check_spec\n"
            "from tests.reference.pages import PAGES\n"
            "from epp.picker.scheduling.schedule import new_share\n"
            "assert new_share(check_spec({'gain': {'newShare': 0.25}})) == 0.25\n"
            "assert any('gain.newShare' in page() for page in PAGES.values())\n"
        ),
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the code with every edit made."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("epp", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for edits, _ in TRIALS.values():
        for file, before, after in edits:
            text = (folder / file).read_text()
            assert text.count(before) == 1, (file, before)
            (folder / file).write_text(text.replace(before, after))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("what", TRIALS)
def test_an_addition_takes_the_edits_that_the_page_names(copy: Path, what: str) -> None:
    edits, program = TRIALS[what]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {what} |"))
    assert row.split("|")[2].strip() == f"{len(edits)} and a test"
    ran = subprocess.run(
        [sys.executable, "-c", f"import epp; assert epp.__path__[0].startswith({str(copy)!r})\n{program}"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def walked() -> Walk:
    return asyncio.run(walk())


def test_no_call_goes_back_up_the_layers(walked: Walk) -> None:
    assert walked.back_up == set()
    assert "- Calls from a lower layer to a higher one: 0." in PAGE


def test_a_request_takes_no_more_modules_and_returns_than_the_page_says(walked: Walk) -> None:
    of_request = " ".join(PAGE.partition("## The way of a request")[2].split())
    to_answer, to_end, returns = map(int, re.findall(r"at most (\d+)", of_request))
    assert len(walked.answered) <= to_answer
    assert len(walked.functions) <= to_end
    assert len(walked.returns) <= returns
    assert "epp.picker.picker" in walked.answered
    assert any(place.startswith("epp.picker.picker to ") for place in walked.returns)
