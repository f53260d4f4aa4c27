"""What holds for every test: Hypothesis judges what the code answers, never how fast this machine was."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("hypothesis") is not None:  # the engine's own environment may go without it
    from hypothesis import HealthCheck, settings

    # By default an example over 0.2 s, or ten that took over 1 s to draw, fail a test: a busy machine does that.
    settings.register_profile(
        "any machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")
