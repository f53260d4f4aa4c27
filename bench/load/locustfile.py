"""Defines closed-loop users: each user waits for its answer, thinks, and asks again.

`python -m bench.load SCENARIO` runs one of these scenarios:

    chat           every prompt is new, so prompts share nothing
    shared         a prompt has one of some long beginnings, of which a few are frequent, and its own question
    conversation   each turn begins with the whole conversation so far; users think between turns
    lora           requests for adapters, chosen by a power law; each adapter has its own beginning

To run one without the command: `locust -f bench/load/locustfile.py ConversationUser --host
http://127.0.0.1:8080`, from the repository's root.
"""

import itertools
import random
from collections.abc import Iterator
from typing import ClassVar

from locust import task
from locust.env import Environment

from bench.load import prompts
from bench.load.locust_run import LoadUser
from bench.load.sse import Answer


class _ClosedLoop(LoadUser):
    abstract = True
    think_s: ClassVar[tuple[float, float]] = (0.5, 1.5)
    scenario: ClassVar[str]
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        options = self.load.options
        self.seed = f"{options.seed} {self.scenario}"
        number = self.load.worker * 1_000_000 + next(self._numbers)
        self.name = f"{self.seed} user {number}"
        self.rng = random.Random(self.name)
        self.asked = 0

    def wait_time(self) -> float:
        return self.rng.uniform(*self.think_s) * float(self.load.options.think)

    def fresh(self, tokens: int) -> str:
        """Return text that was never sent before."""
        self.asked += 1
        return prompts.text(f"{self.name} {self.asked}", tokens)

    def chat(self, messages: list[prompts.Message], *, model: str = "", tenant: str = "") -> Answer | None:
        options = self.load.options
        body = prompts.chat(
            model or self.load.served.model, messages, answer_tokens=options.answer_tokens, salt=options.salt
        )
        return self.load.ask(self.scenario, body, headers=_of_tenant(tenant) if tenant else "")


def _of_tenant(name: str) -> str:
    """Return the header with the tenant's name, as a line."""
    return f"x-llm-d-inference-fairness-id: {name}\r\n"


class ChatUser(_ClosedLoop):
    scenario = "chat"

    @task
    def ask(self) -> None:
        tokens = int(min(6000, 100 + self.rng.lognormvariate(6.0, 0.8)))
        self.chat([{"role": "user", "content": self.fresh(tokens)}])


class SharedPrefixUser(_ClosedLoop):
    scenario = "shared"

    @task
    def ask(self) -> None:
        options = self.load.options
        which = prompts.zipf(self.rng, options.prefixes)
        beginning = prompts.shared_text(f"{self.seed} prefix {which}", options.prefix_tokens)
        question = self.fresh(self.rng.randint(30, 150))
        self.chat([{"role": "system", "content": beginning}, {"role": "user", "content": question}])


class ConversationUser(_ClosedLoop):
    """A user of one tenant. All conversations of the user begin with the tenant's system prompt."""

    scenario = "conversation"
    think_s = (1.0, 4.0)

    def on_start(self) -> None:
        options = self.load.options
        self.tenant = f"tenant-{prompts.zipf(self.rng, max(1, options.prefixes // 4))}"
        self.system = prompts.shared_text(f"{self.seed} {self.tenant}", options.prefix_tokens)
        self.history: list[prompts.Message] = []
        # Users begin in the middle of their first conversation, so that they are not in step.
        self.turns_left = self.rng.randint(1, 6)

    @task
    def turn(self) -> None:
        tokens = self.rng.randint(40, 160) if self.history else self.rng.randint(400, 1500)
        question: prompts.Message = {"role": "user", "content": self.fresh(tokens)}
        messages = [{"role": "system", "content": self.system}, *self.history, question]
        answer = self.chat(messages, tenant=self.tenant)
        self.turns_left -= 1
        if answer is not None:  # a turn that failed is left out: the user goes on without it
            self.history += [question, {"role": "assistant", "content": answer.text}]
        if self.turns_left <= 0:
            self.history = []
            self.turns_left = self.rng.randint(3, 6)


class LoraUser(_ClosedLoop):
    """A user who asks for the served adapters, or for the base model if no adapter is served. `python -m
    bench.load lora` refuses to run without adapters.
    """

    scenario = "lora"

    @task
    def ask(self) -> None:
        adapters = self.load.served.adapters or (self.load.served.model,)
        adapter = adapters[prompts.zipf(self.rng, len(adapters))]
        beginning = prompts.shared_text(f"{self.seed} {adapter}", self.load.options.prefix_tokens)
        question = self.fresh(self.rng.randint(30, 150))
        messages = [{"role": "system", "content": beginning}, {"role": "user", "content": question}]
        self.chat(messages, model=adapter)
