"""A short run of the attack in `mutated_frames`. The command can run longer."""

from __future__ import annotations

import random

from tests.property.http2.mutated_frames import attack


async def test_mutated_frames_leave_nothing_behind() -> None:
    seed = random.SystemRandom().randrange(2**32)
    done = await attack(frames=15_000, seed=seed, report=print)
    assert len(done.reasons) > 10, (seed, done.reasons)
