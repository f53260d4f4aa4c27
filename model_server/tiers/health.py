"""Decides whether a disk that failed may be tried again. Time is an argument.

After a failure the disk is not used for a while. This pause doubles with each further failure and ends with
the first success. So a full or failing disk costs requests almost no time, and a disk that has recovered is
used again. Callers: the writer, the loads.
"""

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0


class Health:
    def __init__(self) -> None:
        self._pause_s = 0.0
        self._paused_until = float("-inf")

    def may_try(self, *, now: float) -> bool:
        return now >= self._paused_until

    def failed(self, *, now: float) -> float:
        """Record a failure. Return the pause in seconds."""
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        self._paused_until = now + self._pause_s
        return self._pause_s

    def worked(self) -> None:
        self._pause_s = 0.0
        self._paused_until = float("-inf")

    def check_integrity(self) -> None:
        assert self._pause_s == 0 or FIRST_PAUSE_S <= self._pause_s <= LONGEST_PAUSE_S
        assert (self._pause_s == 0) == (self._paused_until == float("-inf"))
