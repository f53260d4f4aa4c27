"""Measures the documents' rows that need an accelerator, one after the other: `python3 -m bench.gpu`, planned
for 450 seconds on one data-centre GPU.

No step needs a network. The Python needs torch for CUDA, transformers and xxhash; the command names what is
missing. `--prepare`, where pip works, records what the tiers' step reads: carry build/tiers-patterns too.

Each step is a process of its own. Its measurements and its output are kept in a folder (build/bench-gpu). If
a run was cut off, or a step failed, the next run continues: it leaves out the steps that are done on this
device, and the repeats that a step has kept (`--again` runs all steps). A step that would not fit into the
rest of the time is left for the next run. page.md in that folder shows the state of every step: done, failed,
out of time, not run, or not possible here and why. A run ends within `--limit-s`. The step that is running
then has ten seconds to end its own processes, and is killed afterwards. The next run begins with this step.
The exit status is 0 only if each step is done or not possible. `--tiny` runs the same steps on the CPU at
sizes that only show that the steps run.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.gpu import steps
from bench.gpu.steps import Step
from bench.tables import write_json

DONE, FAILED, OUT_OF_TIME, NOT_POSSIBLE, LEFT = (
    "done",
    "failed",
    "out of time",
    "not possible here",
    "not run",
)
Run = Callable[[Step, list[str]], tuple[int | None, str]]
"""Runs a step's command. Returns its exit status, or None if it ran out of time, and its output."""
_TO_END_S = 10.0
"""The time that a step gets to end its own processes after it was asked to end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    rows: str
    status: str
    device: str
    seconds: float
    output: str
    """The step's output, or the reason why it did not run."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tiny", action="store_true", help="run the steps on the CPU, at tiny sizes")
    parser.add_argument("--device", default="cuda", help="device to run on (default %(default)s)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/bench-gpu"),
        help="folder of the results (default %(default)s)",
    )
    parser.add_argument(
        "--again", action="store_true", help="forget the results so far, and run all steps again"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=450.0,
        help="end the whole run within this many seconds (default %(default)s)",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="record what a machine without a network needs, and end"
    )
    args = parser.parse_args()
    if args.prepare:
        return subprocess.run([sys.executable, "-m", *steps.preparation()], check=False).returncode
    if not args.tiny and (lacking := steps.lacking_packages()):
        wheels = "pip download -d wheels --only-binary :all:"
        parser.error(
            f"{sys.executable} has no {', '.join(lacking)}: where pip works, run `{wheels} {' '.join(lacking)}`, "
            "carry the folder, and let pip install them from it here"
        )
    device = "the CPU, tiny" if args.tiny else gpu_name(args.device)
    if not device:
        parser.error("torch sees no GPU here; --tiny runs the same steps on the CPU")
    if args.again:
        shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    wanted = steps.tiny() if args.tiny else steps.on_gpu(args.device)
    found = run_all(wanted, folder=args.folder, device=device, limit_s=args.limit_s, run=run)
    print(page(found))
    return 0 if all(one.status in (DONE, NOT_POSSIBLE) for one in found) else 1


def gpu_name(device: str) -> str:
    """Return the name of the GPU. The name is empty if torch is not installed or sees no GPU."""
    if importlib.util.find_spec("torch") is None:
        return ""
    import torch  # noqa: PLC0415 - not every Python that runs the tiny steps has it

    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""


def run_all(wanted: Sequence[Step], *, folder: Path, device: str, limit_s: float, run: Run) -> list[Outcome]:
    """Run all steps. Every step gets an outcome.

    The page and the file are written after each step, so that a run may be cut off at any time.
    """
    state = folder / "state.json"
    kept = {one["name"]: Outcome(**one) for one in json.loads(state.read_text())} if state.exists() else {}
    found = {
        step.name: kept[step.name]
        if step.name in kept and (kept[step.name].status, kept[step.name].device) == (DONE, device)
        else Outcome(step.name, step.rows, LEFT, device, 0.0, "")
        for step in wanted
    }
    started, ran = time.monotonic(), False
    for step in wanted:
        if found[step.name].status == DONE:
            continue
        left_s = limit_s - (time.monotonic() - started)
        if left_s <= 0:
            break
        if ran and left_s < step.planned_s and not step.missing:
            continue
        ran = ran or not step.missing
        if step.name in kept and kept[step.name].device != device:
            _figures(folder, step).unlink(missing_ok=True)
        limited = replace(step, timeout_s=min(step.timeout_s, left_s))
        found[step.name] = _outcome(limited, folder=folder, device=device, run=run)
        write_json(state, [asdict(one) for one in found.values()])
        (folder / "page.md").write_text(page(list(found.values())))
    write_json(state, [asdict(one) for one in found.values()])
    (folder / "page.md").write_text(page(list(found.values())))
    return list(found.values())


def page(found: Sequence[Outcome]) -> str:
    lines = ["# Rows on an accelerator", "", "| step | status | device | s |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.name} | {one.status} | {one.device} | {one.seconds:.0f} |" for one in found]
    for one in found:
        if one.output:
            lines += ["", f"## {one.name}: {one.status}", "", one.output.strip()]
    return "\n".join(lines) + "\n"


def _outcome(step: Step, *, folder: Path, device: str, run: Run) -> Outcome:
    if step.missing:
        return Outcome(step.name, step.rows, NOT_POSSIBLE, device, 0.0, step.missing)
    print(f"--- {step.name}", flush=True)
    figures = _figures(folder, step)
    started = time.monotonic()
    status, output = run(step, step.command(sys.executable, figures.absolute()))
    word = {None: OUT_OF_TIME, 0: DONE}.get(status, FAILED)
    if word == DONE and not figures.exists():
        word, output = FAILED, f"it left no figures in {figures}\n{output}"
    return Outcome(step.name, step.rows, word, device, time.monotonic() - started, output)


def _figures(folder: Path, step: Step) -> Path:
    """Return the file of a step's figures. What an incomplete step has left there counts."""
    return folder / f"{step.name.replace(', ', '-').replace(' ', '-')}.json"


def run(step: Step, command: list[str]) -> tuple[int | None, str]:
    """Run a command. A step that takes too long is asked to end, so that it can end its processes. The rest
    of its process group is then killed, because a server that goes on would slow down every later step.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(step.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TO_END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")[-8000:]


if __name__ == "__main__":
    sys.exit(main())
