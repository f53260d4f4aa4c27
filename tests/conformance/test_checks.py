"""`python -m epp.tools.conformance`: our picker passes every row in every dialect, and the command finds
a picker that does not fit.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from epp.config.dialects import DIALECTS, DialectName
from epp.tools.conformance.__main__ import CheckResult, run
from epp.tools.conformance.checks import PickerUnderTest
from tests.conformance.picker import ALIAS, own_picker, picker_of_models

OWN_ENVOY_AWAY = {"edsFile": ""}
NOT_ASKED = {
    "envoy": 4,
    "envoy-gateway": 4,
    "istio": 3,
    "ai-gateway": 3,
    "agentgateway": 3,
    "nginx": 14,
    "gke": 0,
}
"""Checks that do not apply to a gateway, because it takes no body back, sends no subset hint, or shows no
path.
"""


def outcomes(results: list[CheckResult], outcome: str) -> list[str]:
    return [f"row {r.row}: {r.claim}: {r.detail}" for r in results if r.outcome == outcome]


@pytest.mark.usefixtures("both_transports")
@pytest.mark.parametrize("name", DIALECTS)
async def test_our_picker_passes_every_row_in_every_dialect(tmp_path: Path, name: DialectName) -> None:
    async with picker_of_models(tmp_path, dialect=name, envoy=OWN_ENVOY_AWAY) as picker:
        results = await run(
            PickerUnderTest(
                channel=picker.channel,
                dialect=name,
                endpoints=picker.endpoints,
                knows_models=True,
                alias=(ALIAS, "m"),
                prefillers=[str(picker.backends[-1].address)],
            )
        )
    assert outcomes(results, "fail") == []
    assert len(outcomes(results, "not asked")) == NOT_ASKED[name]


async def test_list_for_a_gateway_that_reads_one_address_is_found_by_the_command(tmp_path: Path) -> None:
    """The test runs the command as its users do: exit status and table."""
    async with own_picker(tmp_path, dialect="gke", envoy=OWN_ENVOY_AWAY) as picker:
        options = {
            "--picker": picker.config.listen.address,
            "--endpoints": ",".join(picker.endpoints),
            "--dialect": "ai-gateway",
        }
        command = [
            sys.executable,
            "-m",
            "epp.tools.conformance",
            *(part for pair in options.items() for part in pair),
        ]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
    assert process.returncode == 1
    (failed,) = [line for line in said.decode().splitlines() if line.endswith(" fail")]
    assert "row  5" in failed
    assert "reads the value as one address" in said.decode()
