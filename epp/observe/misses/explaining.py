"""Runs `Misses` beside the requests, and reports its findings as JSON values. `app` keeps it running.

The loop handles some requests at a time, a few times a second.
"""

from __future__ import annotations

import asyncio
import time
from itertools import islice
from typing import Any, Final

from epp.observe.misses.accounts import Missed, Sums
from epp.observe.misses.finding import Misses
from epp.picker.picker import Picker

_LOOK_S: Final = 0.2
_PORTION_STEPS: Final = 5_000
"""Some milliseconds. Other work runs between two portions."""
_PORTIONS: Final = 8
"""Most portions in one look."""
_MOST_SERVERS: Final = 10
"""Most servers that are named for each cause."""
_PERCENT_DIGITS: Final = 4


class Explaining:
    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._misses = Misses(picker)
        picker.subscribe(self._misses.on_event)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for _ in range(_PORTIONS):
                if not self._misses.work(steps=_PORTION_STEPS):
                    break
                await asyncio.sleep(0)

    def account(self, window_s: float) -> dict[str, Any]:
        """Return why tokens were missed in the last `window_s` seconds, as JSON values."""
        misses, now = self._misses, time.monotonic()
        found = misses.accounts.over(window_s, now=now)
        total, missed = found.total(), sum(found.missed.values())
        return {
            "window_s": round(min(window_s, now - found.began_at), 1),
            **_shown(total),
            "policies": [{"policy": name, **_shown(sums)} for name, sums in found.by_policy.items()],
            "causes": [self._cause(part, missed, total.prompt_tokens) for part in found.by_cause()],
            "chunks_followed": f"1 in {misses.seen.one_in}",
            "requests_skipped": misses.skipped,
        }

    def _cause(self, part: Missed, missed: float, prompt_tokens: float) -> dict[str, Any]:
        servers = []
        for name, tokens in islice(part.servers.items(), _MOST_SERVERS):
            mirror = self._picker.caches.table.mirrors.get(name)
            room = mirror.capacity_bytes if mirror else None
            full = _ratio(min(mirror.used_bytes, room), room) if mirror and room else None
            servers.append({"name": name, "tokens": round(tokens), "full": full})
        return {
            "cause": part.cause.name,
            "title": part.cause.title,
            "tokens": round(part.tokens),
            "share_of_missed": _ratio(part.tokens, missed),
            "share_of_prompt": _ratio(part.tokens, prompt_tokens),
            "servers": servers,
            "advice": part.cause.advice,
        }


def _shown(sums: Sums) -> dict[str, Any]:
    return {
        "requests": sums.requests,
        "prompt_tokens": round(sums.prompt_tokens),
        "matched_tokens": round(sums.matched_tokens),
        "hit_ratio": _ratio(sums.matched_tokens, sums.prompt_tokens),
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, _PERCENT_DIGITS) if whole else 0.0
