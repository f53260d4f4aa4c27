"""The floor answers as a picker would, ratios are those of one round, and the CPU at rest does not count."""

import random

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from bench.dataplane.floor import _echo
from bench.dataplane.measure import Cell, CellResult, Lap, Results, Turn, turns_of
from bench.dataplane.report import tables
from bench.dataplane.rig import VariantName
from epp.protocol.codec import encode
from epp.protocol.http_events import Piece, Slot


@pytest.mark.parametrize(("number", "slot"), [(4, Slot.REQUEST_BODY), (5, Slot.RESPONSE_BODY)])
@pytest.mark.parametrize("size_bytes", [0, 1, 127, 128, 70_000])
@pytest.mark.parametrize("is_end", [False, True])
def test_the_floor_echoes_a_body_as_the_picker_does(
    *, number: int, slot: Slot, size_bytes: int, is_end: bool
) -> None:
    body = random.Random(1).randbytes(size_bytes)
    part = ext_proc.HttpBody(body=body, end_of_stream=is_end)
    message = ext_proc.ProcessingRequest(**{slot.value: part}).SerializeToString()
    assert message[0] == number * 8 + 2
    echoed, ended = _echo(message)
    assert ended is is_end
    ours = ext_proc.ProcessingResponse.FromString(encode(Piece(slot, body, end_of_stream=is_end)))
    assert ext_proc.ProcessingResponse.FromString(echoed) == ours


def test_ratios_are_of_the_same_round() -> None:
    def turn(ours_s: float, floor_s: float) -> Turn:
        cpu = {"ours": ours_s, "floor": floor_s, "envoy": 0.1}
        return Turn(requests=10, seconds=1.0, cpu_s=cpu, first_bytes_s=[0.001] * 10)

    cell = Cell("loads", 1, 1, ("floor", "ours"))
    result = CellResult(
        cell,
        # The machine was ten times slower in the second round. The picker cost twice the floor in both
        # rounds.
        turns={
            "floor": [turn(0, 0.01), turn(0, 0.10), turn(0, 0.01)],
            "ours": [turn(0.02, 0), turn(0.2, 0), turn(0.02, 0)],
        },
        messages={"floor": 3.0, "ours": 3.0},
    )
    shown = tables(Results(cells=[result]))
    assert "2.00 ±0.00" in shown
    assert "1 KB prompts, 1 chunks, cost x the floor: 2.00, target 0.75: MISSED" in shown


@pytest.mark.parametrize(("scrapes_count", "ours_s"), [(True, 0.3), (False, 0.4)])
def test_the_cpu_at_rest_is_subtracted(*, scrapes_count: bool, ours_s: float) -> None:
    """Our picker at rest uses a tenth of a core, and a fifth while the other picker serves."""

    def lap(few_s: float, own_s: float) -> Lap:
        return Lap(100, 0.9, 1.0, {"few": few_s, "ours": own_s, "envoy": 0.6}, [0.001])

    cell = Cell("a table", 1, 1, ("few", "ours"), scrapes_count=scrapes_count)
    laps: dict[VariantName, Lap] = {"few": lap(0.2, 0.2), "ours": lap(0.0, 0.5)}
    turns = turns_of(cell, laps, {"few": 0.0, "ours": 0.1, "envoy": 0.1})
    assert turns["ours"].cpu_s == pytest.approx({"few": 0.0, "ours": ours_s, "envoy": 0.5})
    assert turns["few"].each_ms("few") == pytest.approx(2.0)
