"""Runs exact mode: takes KV events of servers and routed prompts, and returns findings for the picker.

When a prompt has been mapped to blocks, its chain is looked up at every server, and the result is a finding.
When a server drops a block, the loss of each chunk that it held until then is a finding. There are no
findings about unknown things: prompts that were not mapped, and blocks that a server stored before its events
were followed.

For each base model it learns how the servers name blocks, from an event with tokens and names, and checks
this at every server. It also checks whether the names that it computes for prompts appear in the events of
the servers that got these prompts. For a server that names blocks in another way, and for a model whose
prompts never appear, the approximate table is used, and the reason is reported.

Pure and synchronous: the thread of `service` calls everything here, with times in monotonic seconds.
"""

import traceback
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from epp.base.types import EndpointName
from epp.picker.prefix_index.reported import (
    ExactModelStatus,
    ExactServerStatus,
    KvReport,
    LookupReport,
    LossReport,
    ModelState,
)
from epp.sources.kvevents.decoding import (
    ALGORITHMS,
    BlockHasher,
    BlockName,
    Cleared,
    KvEvent,
    Removed,
    Stored,
    decode,
)
from epp.sources.kvevents.knowledge import ChunkTree, KnownServer, MappedPrompt
from epp.sources.kvevents.mapping import Language, UnmappedError, map_prompt
from epp.sources.kvevents.routed_prompts import RoutedPrompt
from epp.sources.kvevents.sequence import Forget, Step

_CHECK_AFTER_S: Final = 30.0
"""By then a prompt's blocks are stored, or its server is so busy that a missing block proves nothing."""
_MISSES_TO_DISTRUST: Final = 8
"""Exact mode turns off after this many prompts in a row without a single block at their servers."""
_MAX_CHECKS: Final = 256
_LOOK_AGAIN: Final = 16
"""If a model is off, one in this many prompts is still tried, because the cause may have been removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    language: Language
    seed: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Name -> the path from which servers load the adapter."""


@dataclass(slots=True, eq=False)
class _Model:
    name: str
    settings: ModelSettings | None
    """None: the configuration does not name the model."""
    hasher: BlockHasher | None = None
    """How the servers name blocks. None: no server has shown it yet."""
    block_tokens: int = 0
    fault: str = ""
    """Why the names of the last server that showed them are not ours."""
    checks: deque[tuple[float, EndpointName, Sequence[BlockName]]] = field(
        default_factory=lambda: deque(maxlen=_MAX_CHECKS)
    )
    misses_in_a_row: int = 0
    prompts: Counter[str] = field(default_factory=lambda: Counter(mapped=0, matched=0, missed=0))
    """Numbers of prompts: mapped, matched or missed at their servers, or skipped for some other reason."""

    def fault_in(self, event: Stored) -> str | None:
        """Return why the server of the event does not name blocks as we do. Empty: it does. None: the event
        does not show it.
        """
        if self.settings is None or not event.plain_tokens or not event.blocks or event.partial_attention:
            return None
        size, odd = divmod(len(event.plain_tokens), len(event.blocks))
        if odd or not size:
            return None  # only the tokens of whole blocks show how they are named
        if self.hasher is not None and size != self.block_tokens:
            return f"blocks of {size} tokens; the model's other servers have {self.block_tokens}"
        tried = (self.hasher.algorithm,) if self.hasher else ALGORITHMS
        for algorithm in tried:
            hasher = BlockHasher(algorithm, seed=self.settings.seed)
            if hasher.names(event.plain_tokens[:size], block_tokens=size)[0] == event.blocks[0]:
                if self.hasher is None:
                    self.hasher, self.block_tokens = hasher, size
                return ""
        self.fault = f"its blocks are not named by {', '.join(tried)} from the configured hash seed"
        return self.fault

    def map(self, routed: RoutedPrompt) -> MappedPrompt:
        """Raises UnmappedError."""
        if self.settings is None:
            raise UnmappedError("model")
        if self.hasher is None:
            raise UnmappedError("waiting")
        if self.status().state == "off" and self.prompts.total() % _LOOK_AGAIN:
            raise UnmappedError("off")
        return map_prompt(
            routed,
            language=self.settings.language,
            hasher=self.hasher,
            block_tokens=self.block_tokens,
            adapter_path=self.settings.adapters.get(routed.adapter) if routed.adapter else None,
        )

    def status(self) -> ExactModelStatus:
        """Return what people see of the model."""
        state: ModelState = "off"
        if self.settings is None:
            reason = f"no exactMode.models entry for {self.name or 'the model'}"
        elif self.hasher is None:
            state = "off" if self.fault else "waiting"
            reason = self.fault or "no event with tokens has come yet"
        elif self.misses_in_a_row >= _MISSES_TO_DISTRUST:
            reason = (
                f"no block of {self.misses_in_a_row} prompts in a row appeared at their servers: the tokenizer, chat "
                "template or adapter paths differ from those of the servers"
            )
        elif self.prompts["matched"]:
            state, reason = "on", ""
        else:
            state, reason = "checking", "no routed prompt has appeared in the events yet"
        return ExactModelStatus(
            state=state,
            reason=reason,
            prompts=dict(self.prompts),
            algorithm=self.hasher.algorithm if self.hasher is not None else "",
            block_tokens=self.block_tokens,
        )


class Exact:
    """models: the settings by base model. The empty name is for all other models. max_blocks: the most blocks
    of all servers together. max_chunks: the most chunks of routed prompts.
    """

    def __init__(self, models: Mapping[str, ModelSettings], *, max_blocks: int, max_chunks: int) -> None:
        self._settings = models
        self._max_blocks = max_blocks
        self.tree = ChunkTree(max_chunks=max_chunks)
        """Others only read it."""
        self.known: dict[EndpointName, KnownServer] = {}
        """What is known of each server that is followed. Their blocks change only here."""
        self.num_blocks = 0
        self._models: dict[str, _Model] = {}
        self._found: list[KvReport] = []
        self.malformed = 0
        """Number of messages that were no KV events."""
        self.last_error = ""
        """The last unexpected error of a prompt, and its place. Its text could quote the prompt."""

    # -- servers ---------------------------------------------------------------------------------------------

    def add(self, server: EndpointName, *, model: str) -> None:
        if model not in self._models:
            settings = self._settings.get(model) or self._settings.get("")
            self._models[model] = _Model(model, settings)
        self.known[server] = KnownServer(self.tree, model=model)

    def drop(self, server: EndpointName) -> None:
        """Stop following a server. There are no more findings about it."""
        self.forget(server)
        model = self.known.pop(server).model
        if all(known.model != model for known in self.known.values()):
            del self._models[model]

    def forget(self, server: EndpointName) -> None:
        """Called when nothing is known about the server any more: neither which blocks it holds nor which it
        lacks.
        """
        self.num_blocks -= len(self.known[server])
        self.known[server].forget()

    def apply(self, server: EndpointName, steps: Iterable[Step], *, complete: bool, now: float) -> None:
        """Apply a server's messages, in order. complete: no message of this process is missing."""
        known = self.known[server]
        for step in steps:
            match step:
                case Forget.RESTART:
                    self.learn(server, Cleared(), now=now)
                    known.off, known.agreed = "", False
                case Forget.GAP:
                    self.forget(server)
                case payload:
                    self._deliver(server, known, payload, now=now)
        known.complete = complete and not known.off

    def _deliver(self, server: EndpointName, known: KnownServer, payload: bytes, *, now: float) -> None:
        events = decode(payload)
        if events is None:
            self.malformed += 1
            return
        known.events += len(events)
        for event in events:
            if isinstance(event, Stored) and not known.off and not known.agreed:
                fault = self._models[known.model].fault_in(event)
                known.agreed = fault == ""
                if fault:
                    self._switch_off(server, fault)
            if known.off:
                return
            self.learn(server, event, now=now)
        if self.num_blocks > self._max_blocks:
            self._switch_off(
                max(self.known, key=lambda name: (len(self.known[name]), name == server)),
                f"all servers together hold more than {self._max_blocks} blocks, and this one the most: "
                "raise exactMode.maxBlocks",
            )

    def learn(self, server: EndpointName, event: KvEvent, *, now: float) -> None:
        """Apply one event of a server."""
        known = self.known[server]
        before = len(known)
        match event:
            case Stored():
                known.store(event)
            case Removed():
                known.remove(event, now=now)
            case Cleared():
                known.clear(now=now)
        self.num_blocks += len(known) - before

    def _switch_off(self, server: EndpointName, reason: str) -> None:
        self.known[server].off = reason
        self.forget(server)

    # -- prompts ---------------------------------------------------------------------------------------------

    def routed(self, routed: RoutedPrompt, *, now: float) -> None:
        """Called when a server has begun to answer a prompt."""
        known = self.known.get(routed.server)
        if known is None:
            return
        model = self._models[known.model]
        try:
            mapped = model.map(routed)
        except UnmappedError as error:
            model.prompts[str(error)] += 1
        except Exception as error:  # noqa: BLE001 - a client's text caused this error, which may cost only its own prompt
            model.prompts["error"] += 1
            at = traceback.extract_tb(error.__traceback__)[-1]
            self.last_error = f"{type(error).__name__} at {at.filename}:{at.lineno}"
        else:
            model.prompts["mapped"] += 1
            self.look_up(mapped, now=now)
            if mapped.blocks:
                ends = mapped.blocks[0], mapped.blocks[-1]
                model.checks.append((now + _CHECK_AFTER_S, routed.server, ends))

    def look_up(self, prompt: MappedPrompt, *, now: float) -> None:
        """Look up the chain of a routed prompt at every server."""
        self._found += self._losses()
        path = self.tree.map(prompt)
        unknown = next((k for k, end in enumerate(prompt.ends_blocks) if end), len(path))
        held = {}
        for name, known in self.known.items():
            chunks = next((k for k, node in enumerate(path) if not known.holds(node)), len(path))
            if chunks > unknown:
                held[name] = chunks
        if held:
            report = LookupReport(
                chain=prompt.chain[: max(held.values())],
                held=held,
                sure=frozenset(name for name, known in self.known.items() if known.complete),
                from_chunk=unknown,
                at=now,
            )
            self._found.append(report)

    def _check(self, model: _Model, *, now: float) -> None:
        """Find out whether the prompts' blocks have appeared at their servers, by the first and the last
        block.
        """
        while model.checks:
            due, server, names = model.checks[0]
            held = self.known.get(server)
            if held is not None and any(name in held for name in names):
                model.checks.popleft()
                model.prompts["matched"] += 1
                model.misses_in_a_row = 0
                continue
            if due > now:
                return
            model.checks.popleft()
            if held is None or not held.complete:
                continue  # blocks that the server stored before its events were followed are not known
            model.prompts["missed"] += 1
            model.misses_in_a_row += 1

    def findings(self, *, now: float) -> list[KvReport]:
        """Return the changes since the last call, in an order in which they can be applied one by one."""
        for model in self._models.values():
            self._check(model, now=now)
        found, self._found = self._found, []
        return found + self._losses()

    def _losses(self) -> list[KvReport]:
        return [
            LossReport(server=name, chain=node.chain(), at=at)
            for name, known in self.known.items()
            for node, at in known.lost().items()
        ]

    # -- for people ------------------------------------------------------------------------------------------

    def models(self) -> dict[str, ExactModelStatus]:
        return {name: model.status() for name, model in self._models.items()}

    def servers(self) -> dict[EndpointName, ExactServerStatus]:
        return {
            name: ExactServerStatus(
                state="off" if known.off else "following" if known.complete else "partly",
                reason=known.off,
                blocks=len(known),
                events=known.events,
            )
            for name, known in self.known.items()
        }
