"""How good the forecasts are by which flow control refuses requests. Here it is off: late requests are seen.

`python -m tests.unit.sim.test_flow_calibration` draws docs/flow-calibration.svg (15 s of one core).
"""

import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import fmean

import pytest

from bench.drawing import svg
from bench.routing.bench import Run, Setting, calibrate, plan_of, spec_of, work_of
from bench.routing.picker_router import PickerRouter
from bench.routing.rows import GOOD_TTFT_S
from epp.config.policy import DEFAULT_POLICY
from epp.picker.events import Began, PickerEvent
from epp.tools.replay.simulate import ttft_s
from model_server.sim.fleet import Fleet

_FILE = Path(__file__).parents[3] / "docs" / "flow-calibration.svg"
_WORKLOADS = ("conversation", "none", "tenants")
_LOADS = (1.3, 2.0)
_COLOURS = ("#54aeff", "#0550ae", "#f778ba", "#99286e", "#4ac26b", "#116329")

Pairs = list[tuple[float, float]]
"""What a forecast says, and what is true."""


def times_of(workload: str, load: float, *, seeds: int, scale: float) -> Pairs:
    """Return the time to the first token of each request: by the forecast at its pick, and in truth."""
    setting, spec, times = Setting(scale=scale), spec_of(workload), Pairs()
    rate, _ = calibrate(workload, setting)
    for seed in range(1, 1 + seeds):
        run = Run(workload=workload, rule="", load=load, seed=seed, setting=setting, capacity_per_s=rate)
        requests, arrivals_s = work_of(run, spec)
        plan, router = plan_of(setting, spec, arrivals_s=arrivals_s), PickerRouter(DEFAULT_POLICY, seed=seed)
        events: list[PickerEvent] = []
        router.pickers[0].subscribe(events.append)
        outcome = Fleet(plan, router=router, workload=requests, rng=random.Random(seed)).run()
        begun = [event.pick for event in events if isinstance(event, Began)]
        forecasts_s = {pick.decision.request_id: pick.decision.predicted_s for pick in begun}
        for record in outcome.records:
            times.append((forecasts_s[str(record.request.request_id)], ttft_s(record, outcome.ended_s)))
    return times


def points_of(times: Pairs, others: Sequence[Pairs]) -> Pairs:
    """Return the mean probability of a late first token, and the share that was late, for each tenth of the
    probabilities. The probability is the share of the forecasts near the deadline, for other workloads, that
    were wrong by such a factor that this request would be late.
    """
    near = [(said_s, was_s) for said_s, was_s in chain(*others) if 0.5 <= said_s / GOOD_TTFT_S < 2]
    factors = sorted(was_s / said_s for said_s, was_s in near)
    tenths: list[list[tuple[float, float]]] = [[] for _ in range(10)]
    for said_s, was_s in times:
        likely = 1 - bisect(factors, GOOD_TTFT_S / said_s) / len(factors)
        tenths[min(9, int(10 * likely))].append((likely, float(was_s > GOOD_TTFT_S)))
    return [(fmean(x), fmean(y)) for x, y in (zip(*of, strict=True) for of in tenths if len(of) >= 20)]


def calibration(*, seeds: int, scale: float) -> dict[tuple[str, float], Pairs]:
    cells = list(product(_WORKLOADS, _LOADS))
    times = {(name, load): times_of(name, load, seeds=seeds, scale=scale) for name, load in cells}
    return {of: points_of(own, [times[at] for at in times if at[0] != of[0]]) for of, own in times.items()}


def picture(series: Mapping[tuple[str, float], Pairs]) -> str:
    side, left, top = 300, 36, 12
    axes = f'<path d="M{left} {top} h{side} v{side} h-{side} z m0 {side} l{side} -{side}" fill="none"/>'
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        along, up = round(left + side * share), round(top + side * (1 - share))
        axes += f'<text x="{along - 8}" y="{top + side + 16}">{share:g}</text>'
        axes += f'<text x="{left - 24}" y="{up + 4}">{share:g}</text>'
    title = "x: probability of a late first token by the forecast; y: share that was late"
    rows = [f'{axes}<text x="{left}" y="{top + side + 38}">{title}</text>']
    for row, ((workload, load), points) in enumerate(series.items()):
        y = top + 20 * row + 8
        places = [(left + side * likely, top + side * (1 - late)) for likely, late in points]
        dots = "".join(
            f'<circle cx="{x:.0f}" cy="{y:.0f}" r="5"/>' for x, y in [*places, (left + side + 20, y)]
        )
        text = f'<text x="{left + side + 32}" y="{y + 4}">{workload}, load {load:g}</text>'
        rows.append(f'<g style="fill: {_COLOURS[row]}">{dots}{text}</g>')
    return svg(left + side + 170, top + side + 50, ["".join(rows)])


@pytest.mark.slow
def test_requests_that_will_hardly_be_late_are_not_and_the_others_are() -> None:
    found = calibration(seeds=1, scale=0.1)
    points = list(chain(*found.values()))
    assert all(late < 0.2 for likely, late in points if likely < 0.1)
    assert all(late > 0.8 for likely, late in points if likely > 0.95)
    assert len(found) == picture(found).count("<g ")


if __name__ == "__main__":
    _FILE.write_text(picture(calibration(seeds=3, scale=0.3)))
