"""Measures the CPU that `epp explain` costs for each request: `python -m bench.bench_explain`. Prints figures
and asserts nothing.
"""

from __future__ import annotations

import argparse
import time

from epp.config.policy import PolicySpec
from epp.misses.finding import Misses
from epp.picker.events import Began, PickerEvent
from tests.unit.picker_questions import a_picker, ask, text


def main(rounds: int = 300) -> None:
    print(f"{'prompt':>8}  {'during the pick':>15}  {'after the pick':>14}   (us of CPU)")
    for size in (1024, 8192, 40_960):
        picker = a_picker(PolicySpec(), on=())
        misses = Misses(picker)
        events: list[PickerEvent] = []
        picker.subscribe(events.append)
        for n in range(rounds):
            prompt = text(f"system {n % 20}", size // 2) + text(f"{n}", size // 2)
            pick = picker.pick(ask(prompt), now=n / 10)
            picker.end(pick, outcome="ended", now=n / 10)
        began = [event for event in events if isinstance(event, Began)]
        at = time.process_time()
        for event in began:
            misses.on_event(event)
        heard = time.process_time()
        misses.work(limit=rounds)
        worked = time.process_time()
        print(f"{size:>8,}  {1e6 * (heard - at) / rounds:>15.2f}  {1e6 * (worked - heard) / rounds:>14.1f}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
