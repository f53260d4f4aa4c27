"""Measures CPU and time of recording and of `epp replay`: `python -m bench.bench_replay`. Prints figures and
asserts nothing.

A simulated fleet makes the requests, as in the tests of replay: 7,200 prompt tokens and 1,000 tokens of
answer each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from epp.config.policy import PolicySpec
from epp.recording.recorder import Recorder
from epp.replay.reading import read
from epp.replay.simulate import Setting, run
from epp.request.response import ResponseFeedback
from tests.unit.picker_questions import a_picker, ask, text
from tests.unit.replay.recordings import record_simulation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=10_000, help="number of requests (default %(default)s)"
    )
    count = parser.parse_args().requests
    print(f"recording a request of 8 KB on the event loop: {_recorded_us():.1f} us of CPU")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recording.jsonl"
        record_simulation(path, requests=count, horizon_s=1e6)
        size = path.stat().st_size
        began, cpu_s = time.monotonic(), time.process_time()
        trace = read([path])
        read_s = time.process_time() - cpu_s
        assert trace.policy is not None
        run(trace, trace.policy, Setting(), progress=lambda _: None)
        print(
            f"{len(trace.calls):,} requests, {size / len(trace.calls):,.0f} bytes each in the file: replayed by one policy in "
            f"{time.process_time() - cpu_s:.1f} s of CPU (reading {read_s:.1f} s), {time.monotonic() - began:.1f} s of time"
        )


def _recorded_us(rounds: int = 2000) -> float:
    picker, recorder = a_picker(PolicySpec()), Recorder(key=b"k", most_waiting_bytes=2**30)
    prompt = text("one")
    pick = picker.pick(ask(prompt, stream=True), now=0.0)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=0.1)
    picker.on_feedback(pick, ResponseFeedback(first_token_at=0.2), now=0.3)
    picker.end(pick, outcome="ended", now=1.0)
    began = time.process_time()
    for _ in range(rounds):
        recorder.ended(pick, unix_now_s=2.0)
    return (time.process_time() - began) / rounds * 1e6


if __name__ == "__main__":
    main()
