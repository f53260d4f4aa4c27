"""Makes the demo's workload: users of several tenants, each in conversations of several turns. Pure: the same
seed gives the same words.

A tenant is a company's assistant. Each tenant has its own long system prompt and its own `cache_salt`, so
nothing that is cached for one tenant is used for another. A user belongs to one tenant, talks for a few
turns, starts again, and thinks between turns. The first message of a conversation contains a document; later
ones are short. Every turn sends the whole conversation so far, as chat clients do.

Every user has a fixed number of requests, and every answer a fixed length, so each rule gets exactly the same
work.

The sizes (see `Shape`) are those of ordinary chat over documents, with the model server's default costs: an
8B model on one data-centre GPU, with a cache of the size that a small card has left beside the weights. They
were chosen so that
- the prefixes in use at one time (system prompts, documents, conversations) need much more than the cache of
  one server, and much less than the caches of four servers together. A router that
  does not consider prefixes then makes each server evict prefixes that it needs next;
- by round robin the servers are busy but not overloaded: a queue that only grows would make any comparison
  look good.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

MODEL: Final = "demo"

_CHARS_PER_TOKEN: Final = 5
_CHARS_PER_ANSWER_TOKEN: Final = 5

_TEXT: Final = (
    "account after again agreement amount answer before between branch budget cable carrier change claim clear "
    "client close contract copy country customer date deliver device draft early engine entry error estimate event "
    "expect field figure filter first form garden given ground handle harbour history house index invoice island "
    "item journey kind label later ledger letter level limit line machine manual market matter measure meeting "
    "method metal minute month morning network notice number offer office often open order other paper partner "
    "payment people period plan point policy price process product quarter question rather reading reason record "
    "region release remark repair report request result return review river room rule safety sample schedule season "
    "second section service shipment short simple source spring stage standard station storage street subject summer "
    "supply support system table team term ticket today total train transfer travel under update usual value vendor "
    "version visit warehouse water weather week window winter within without work workshop written year"
)
_WORDS: Final = _TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a workload. Words are about 1.4 tokens."""

    users: int
    tenants: int
    requests_per_user: int
    system_words: int = 1500
    document_words: tuple[int, int] = (500, 1500)
    message_words: tuple[int, int] = (30, 120)
    answer_tokens: tuple[int, int] = (30, 90)
    turns: tuple[int, int] = (3, 6)
    think_s: tuple[float, float] = (1.0, 3.0)
    arrivals_per_s: float = 5.0
    """The number of users that begin in each second. Few services see all users begin at once."""
    conversations: int = 0
    """A user has only so many conversations, and repeats them in turn. 0: each conversation is new."""

    @property
    def requests(self) -> int:
        return self.users * self.requests_per_user

    @classmethod
    def of(cls, *, servers: int, requests: int) -> Shape:
        """Return a workload of about this many requests, from enough users to keep this many servers busy."""
        users = max(1, min(11 * servers, requests // 3))
        return cls(users=users, tenants=2 * servers, requests_per_user=max(2, round(requests / users)))

    @classmethod
    def for_real_model(cls, *, servers: int, requests: int) -> Shape:
        """Return a workload for servers that compute some hundred tokens a second: a tenth of the words,
        and a few users.
        """
        users = max(1, min(4 * servers, requests // 3))
        return cls(
            users=users,
            tenants=2 * servers,
            requests_per_user=max(2, round(requests / users)),
            system_words=150,
            document_words=(40, 100),
            message_words=(8, 20),
            answer_tokens=(6, 14),
            turns=(3, 3),
            arrivals_per_s=0.5,
        )

    @classmethod
    def serial(cls, *, servers: int, requests: int) -> Shape:
        """Return one user who sends the same prompts again and again, one request at a time. The prompts fit
        the servers' caches, but not one of them.
        """
        return cls(
            users=1,
            tenants=1,
            requests_per_user=requests,
            system_words=10,
            document_words=(3500, 3500),
            answer_tokens=(10, 10),
            turns=(1, 1),
            think_s=(0.1, 0.1),
            conversations=5 * servers - 1,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what the user says, how long the answer is, and the pause before."""

    message: str
    answer_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class User:
    """One user's conversations, in order."""

    tenant: int
    conversations: Sequence[Sequence[Turn]]


@dataclass(frozen=True, slots=True)
class Workload:
    """All users with their turns. `body` makes the request of one turn."""

    shape: Shape
    systems: Sequence[str]
    """The system prompt of each tenant."""
    users: Sequence[User]

    def body(
        self, user: User, history: Sequence[tuple[str, str]], turn: Turn, *, nonce: str
    ) -> dict[str, Any]:
        """Return the chat request of `turn` after `history` (the messages and answers so far). `nonce` makes
        the prompts of each run different.
        """
        system = f"Run {nonce}. {self.systems[user.tenant]}"
        messages = [{"role": "system", "content": system}]
        for message, answer in history:
            messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": turn.message})
        return {
            "model": MODEL,
            "messages": messages,
            "cache_salt": f"tenant-{user.tenant}",
            "max_tokens": turn.answer_tokens,
            "ignore_eos": True,
            "stream": True,
        }

    @property
    def live_prefix_tokens(self) -> int:
        """Return about how many tokens a cache needs for the system prompt of every tenant and the current
        conversation of every user.
        """
        chars = sum(map(len, self.systems))
        for user in self.users:
            sizes = [_said_chars(conversation) for conversation in user.conversations]
            chars += (self.shape.conversations or 1) * sum(sizes) // len(sizes)
        return chars // _CHARS_PER_TOKEN // 1000 * 1000

    def reusable_share(self) -> float:
        """Return about the share of all prompt text that would already be in one cache of unlimited size."""
        total = reusable = 0
        tenants_seen: set[int] = set()
        for user in self.users:
            system = len(self.systems[user.tenant])
            for number, conversation in enumerate(user.conversations):
                repeated = 0 < self.shape.conversations <= number
                known = system if user.tenant in tenants_seen else 0
                tenants_seen.add(user.tenant)
                for n, turn in enumerate(conversation):
                    prompt = system + _said_chars(conversation[:n]) + len(turn.message)
                    total += prompt
                    reusable += prompt if repeated else known
                    known = prompt + turn.answer_tokens * _CHARS_PER_ANSWER_TOKEN
        return reusable / total


def _said_chars(turns: Sequence[Turn]) -> int:
    return sum(len(turn.message) + turn.answer_tokens * _CHARS_PER_ANSWER_TOKEN for turn in turns)


def make_workload(shape: Shape, *, seed: int) -> Workload:
    """Make a workload. The same shape and seed always give the same workload."""
    rng = random.Random(seed)
    systems = [_text(rng, shape.system_words) for _ in range(shape.tenants)]
    # Some tenants are larger than others, as in real services.
    weights = [1 / (n + 1) ** 0.5 for n in range(shape.tenants)]
    tenants = rng.choices(range(shape.tenants), weights, k=shape.users)
    return Workload(shape, systems, [_user(rng, shape, tenant) for tenant in tenants])


def _user(rng: random.Random, shape: Shape, tenant: int) -> User:
    conversations: list[list[Turn]] = []
    arrival_s = rng.uniform(0, shape.users / shape.arrivals_per_s)
    left = shape.requests_per_user
    while left:
        if 0 < shape.conversations <= len(conversations):
            conversations.append(conversations[-shape.conversations][:left])
            left -= len(conversations[-1])
            continue
        # Users begin in the middle of their first conversation, so that they are not in step.
        shortest = shape.turns[0] if conversations else 1
        turns = min(left, rng.randint(shortest, shape.turns[1]))
        conversations.append([_turn(rng, shape, first=n == 0) for n in range(turns)])
        left -= turns
    conversations[0][0] = replace(conversations[0][0], think_s=arrival_s)
    return User(tenant, conversations)


def _turn(rng: random.Random, shape: Shape, *, first: bool) -> Turn:
    message = _text(rng, rng.randint(*shape.message_words))
    if first:
        message = f"{_text(rng, rng.randint(*shape.document_words))}\n\n{message}"
    return Turn(message, rng.randint(*shape.answer_tokens), rng.uniform(*shape.think_s))


def _text(rng: random.Random, words: int) -> str:
    """Return this many words, in sentences."""
    drawn = rng.choices(_WORDS, k=words)
    sentences = [" ".join(drawn[n : n + 12]).capitalize() for n in range(0, words, 12)]
    return ". ".join(sentences) + "."
