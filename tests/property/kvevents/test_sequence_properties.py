"""A follower reads numbered messages from a publisher that drops messages, keeps few of them, and is
replaced by another process.
"""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epp.sources.kvevents.sequence import Forget, Messages, Step
from tests.invariants.kvevents import check_sequence


class SequenceMachine(RuleBasedStateMachine):
    @initialize(replays=st.booleans(), keeps=st.integers(0, 12), late=st.integers(0, 6))
    def start(self, *, replays: bool, keeps: int, late: int) -> None:
        self.replays, self.keeps = replays, keeps
        self.process, self.time_s = 0, 1000.0
        self.sent: list[bytes] = []
        """Messages that the current process has sent."""
        self.applied: list[bytes] = []
        """Messages that the follower believes to have been sent since it last forgot everything."""
        self.gaps = {"found": 0, "lost": 0}
        self.sequence = Messages(replays=replays, gaps=self.gaps)
        self.waiting: list[tuple[int, bytes]] = []
        """Published messages that wait for the end of a replay."""
        for _ in range(late):
            self.next_message()
        self.replay: tuple[int, list[tuple[int, bytes]]] | None = None

    def next_message(self) -> tuple[int, bytes]:
        self.time_s += 1.0
        sent_by = msgspec.msgpack.encode([self.time_s, [self.process, len(self.sent)]])
        self.sent.append(sent_by)
        return len(self.sent) - 1, self.sent[-1]

    def take(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Forget):
                self.applied.clear()
            else:
                self.applied.append(step)
        while self.waiting and self.sequence.due is None:
            self.take(self.sequence.live(*self.waiting.pop(0)))

    @rule()
    def a_message_arrives(self) -> None:
        self.waiting.append(self.next_message())
        self.take([])

    @rule()
    def a_message_is_lost(self) -> None:
        self.next_message()

    @rule()
    def the_replay_is_asked_for(self) -> None:
        due = self.sequence.due
        if due is None or (self.replay is not None and self.replay[0] == due):
            return
        kept = list(enumerate(self.sent))[max(0, len(self.sent) - self.keeps) :]
        self.replay = due, [m for m in kept if m[0] >= due]

    @rule()
    def the_replay_goes_on(self) -> None:
        if self.replay is None or self.replay[0] != self.sequence.due:
            return
        if self.replay[1]:
            self.take(self.sequence.replayed(*self.replay[1].pop(0)))
        else:
            self.no_answer_comes()

    @rule()
    def no_answer_comes(self) -> None:
        if self.sequence.due is not None:
            self.replay = None
            self.take(self.sequence.replay_over())

    @rule(known=st.booleans())
    def another_process_starts(self, *, known: bool) -> None:
        """The follower learns of it from elsewhere or from the first message. It cannot learn it if the
        new numbers happen to go on where the old ones ended.
        """
        self.process += 1
        self.sent = []
        if known:
            self.waiting.clear()  # as the owner of the sockets does
            self.replay = None
            self.take(self.sequence.restarted())
        else:
            if self.replay is not None:
                self.replay = self.replay[0], []  # nobody sends the request to the new process again
            self.a_message_arrives()

    @rule()
    def all_messages_arrive(self) -> None:
        """When messages and replays arrive, the follower believes exactly what this process sent last."""
        for _ in range(4):
            self.a_message_arrives()
            for _ in range(3 * len(self.sent) + 10):
                self.the_replay_is_asked_for()
                self.the_replay_goes_on()
        assert self.sequence.due is None
        assert self.applied
        assert self.applied[-1] == self.sent[-1]
        if self.replays and self.keeps >= len(self.sent) and self.sequence.complete:
            assert self.applied == self.sent

    @precondition(lambda self: hasattr(self, "sequence"))
    @invariant()
    def the_believed_messages_are_of_one_process_without_a_gap(self) -> None:
        check_sequence(self.sequence)
        numbers = [msgspec.msgpack.decode(payload)[1] for payload in self.applied]
        assert len({process for process, _ in numbers}) <= 1
        order = [number for _, number in numbers]
        assert order == list(range(order[0], order[0] + len(order))) if order else True
        if self.sequence.complete and order:
            assert order[0] == 0


@pytest.mark.parametrize(("time_s", "steps"), [(1003.0, []), (2000.0, [Forget.RESTART])])
def test_a_new_process_whose_first_message_was_lost_is_noticed(time_s: float, steps: list[Step]) -> None:
    """A message that a replay has brought already has an earlier time than the last one."""
    sequence = Messages(replays=True, gaps={"found": 0, "lost": 0})
    for number in range(300):
        sequence.replayed(number, msgspec.msgpack.encode([1000.0 + number, []]))
    assert sequence.replay_over() == []
    assert sequence.live(3, msgspec.msgpack.encode([time_s, []])) == steps


TestSequence = pytest.mark.slow(SequenceMachine.TestCase)
TestSequence.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
