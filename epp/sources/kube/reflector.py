"""Follows one kind of object: lists all objects, then watches them without end. It reports the current state,
not the history.

The list is paged. It starts again when a watch cannot continue (410: the missed events are gone). Watches ask
for bookmarks, so that even a quiet watch can continue where it stopped. A broken watch continues from the
last version that was seen. A silent watch counts as dead. While the API server is away nothing is forgotten:
the collection keeps its objects, and the next list corrects them. Pauses grow and are jittered, so that a
fleet of pickers does not overload a server that comes back.

Called by `pools` and `cluster`.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Generic, TypeVar

import msgspec

from epp.request.jsontext import CostlyJsonError, check_cost
from epp.sources.keep import Keep, Pauses
from epp.sources.kube.api import Api, ApiError
from epp.sources.kube.objects import Failure, KubeObject

_log = logging.getLogger(__name__)

_PAGE: Final = "500"
_GONE: Final = 410
_WATCH_S: Final = (240, 360)
"""A watch ends after about this many seconds and is opened again. Watches do not all end at the same time."""
_IDLE_S: Final = 100.0
"""A bookmark comes about once a minute, so a connection that is silent for longer is dead."""
_LONGEST_PAUSE_S: Final = 10.0
_LIVED_S: Final = 5.0
"""A watch that lasted this long was not refused, so the next pause is short again."""
_ADVICE: Final = {
    401: "; the API server does not accept the credentials (any more): check the user of the kubeconfig, or the "
    "pod's service account",
    403: "; grant the picker's service account the rules of the chart's files/picker-rules.yaml",
    404: "; is its CustomResourceDefinition installed?",
}

T = TypeVar("T", bound=KubeObject)
V = TypeVar("V")
_Decoded = TypeVar("_Decoded", bound=msgspec.Struct)


@dataclass(slots=True, eq=False)
class Collection(Generic[T, V]):
    """The objects of one kind, and what counts of each by its name. `replace`, `put` and `remove` return
    whether anything that counts has changed.
    """

    what: str
    """Their name for logs and metrics, such as pods or policies."""
    kind: type[T]
    path: str
    """Where the API server has the objects."""
    read: Callable[[T, V | None], V | None]
    """Returns what counts of an object, or None if nothing does. It gets what counted of the object until
    now."""
    selectors: Sequence[tuple[str, str]] = ()
    """Which of the objects to follow."""
    most: int = sys.maxsize
    """Most objects that count. The newest are left out."""
    left_out: bool = False
    """Whether some were left out since the last list."""
    found: dict[str, V] = field(default_factory=dict)
    listed: bool = False
    """Whether the objects have been listed, so that those which are not here do not exist."""

    def replace(self, objects: Sequence[T]) -> bool:
        self.listed, self.left_out = True, False
        gone = self.found.keys() - {each.metadata.name for each in objects}
        by_age = sorted(objects, key=lambda each: each.metadata.creation_timestamp)
        return any([*map(self.remove, gone), *map(self.put, by_age)])

    def put(self, found: T) -> bool:
        name = found.metadata.name
        before = self.found.get(name)
        after = self.read(found, before)
        if after is not None and before is None and len(self.found) >= self.most:
            self.left_out, after = True, None
        if after is None:
            return self.remove(name)
        self.found[name] = after
        return after != before

    def remove(self, name: str) -> bool:
        return self.found.pop(name, None) is not None


@dataclass(frozen=True, slots=True)
class Access:
    """What the reflectors share. `on_state` is called when the connection of one comes or goes. Their loops
    are tasks of `group`.
    """

    api: Api
    namespace: str
    on_state: Callable[[str, bool], None]
    keep: Keep
    rng: Random
    group: asyncio.TaskGroup

    def start(self, run: Callable[[], Awaitable[None]], *, name: str) -> asyncio.Task[None]:
        return self.group.create_task(self.keep("kubernetes", run), name=name)

    def follow(
        self, objects: Collection[Any, Any], *, on_change: Callable[[], None], name: str
    ) -> asyncio.Task[None]:
        return self.start(Reflector(self, objects, on_change=on_change).run, name=name)


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _ObjectPage(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: list[msgspec.Raw] = []


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


@dataclass(slots=True, eq=False)
class Reflector(Generic[T]):
    """Keeps a collection up to date. `on_change` is called after each list, and after each event that changed
    anything.
    """

    access: Access
    collection: Collection[T, Any]
    on_change: Callable[[], None]
    _version: str = ""
    """The version from which a watch can continue. Empty: list first."""
    _complaint: str | None = None
    """Why it cannot be followed now. Empty: it can. None: nobody has asked yet."""
    _unreadable: str = ""
    """The last message about an object, or its status, that cannot be read."""

    async def run(self) -> None:
        loop, pauses = asyncio.get_running_loop(), Pauses(self.access.rng, longest_s=_LONGEST_PAUSE_S)
        while True:
            started = loop.time()
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ApiError as error:
                if error.status == _GONE:
                    self._version = ""
                else:
                    self._report(error)
            if loop.time() - started >= _LIVED_S:
                pauses.reset()
            await asyncio.sleep(pauses.next_s())

    async def _list(self) -> None:
        found: list[T] = []
        listed = 0
        token = ""
        while True:
            query = [*self.collection.selectors, ("limit", _PAGE)]
            if token:
                query.append(("continue", token))
            text = await self.access.api.request("GET", self.collection.path, query=query)
            page = self._decode(text, _ObjectPage)
            found += [one for item in page.items if (one := self.read(item)) is not None]
            listed += len(page.items)
            token = page.metadata.continue_
            if not token:
                break
        if listed and not found:
            raise ApiError(f"none of {listed} objects can be read")
        self.collection.replace(found)
        self._version = page.metadata.resource_version
        self._report()
        self.on_change()

    async def _watch(self) -> None:
        query = [
            *self.collection.selectors,
            ("watch", "1"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", self._version),
            ("timeoutSeconds", str(self.access.rng.randint(*_WATCH_S))),
        ]
        # If this loop is left early, by an event or by a cancellation,
        # the connection must not wait for the garbage collector.
        async with aclosing(
            self.access.api.watch(self.collection.path, query=query, idle_s=_IDLE_S)
        ) as lines:
            async for line in lines:
                self._report()
                if line:
                    self._take(self._decode(line, _Event))

    def _take(self, event: _Event) -> None:
        if event.type == "ERROR":
            self._version = ""  # only a new list leads past what the server cannot give
            failure = self._decode(event.object, Failure)
            raise ApiError(f"{failure.code} {failure.message}", status=failure.code)
        if event.type == "BOOKMARK":
            self._version = self._decode(event.object, KubeObject).metadata.resource_version
            return
        found = self.read(event.object)
        if found is None:
            # It is unknown which object this is. A new list has all objects that can be read.
            raise ApiError("an object cannot be read", status=_GONE)
        objects = self.collection
        changed = objects.remove(found.metadata.name) if event.type == "DELETED" else objects.put(found)
        self._version = found.metadata.resource_version
        if changed:
            self.on_change()
        if objects.left_out and len(objects.found) < objects.most:
            raise ApiError("an object that was left out counts", status=_GONE)  # a list says which one

    def read(self, text: msgspec.Raw) -> T | None:
        """Decode one object. None: it cannot be read. An unreadable object must not keep out the others. A
        status that cannot be read counts as absent: another release may have written it.
        """
        try:
            if self.collection.kind.free_form:
                check_cost(bytes(text))
            try:
                return msgspec.json.decode(text, type=self.collection.kind)
            except msgspec.ValidationError as error:
                fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
                fields.pop("status", None)
                found = msgspec.json.decode(msgspec.json.encode(fields), type=self.collection.kind)
                self._pass_over("the status of one", error)
                return found
        except (CostlyJsonError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._pass_over("one", error)
            return None

    def _pass_over(self, part: str, error: Exception) -> None:
        """Log once that a part of what was read does not count."""
        if str(error) != self._unreadable:
            self._unreadable = str(error)
            _log.error(
                "%s of the %s cannot be read and does not count: %s", part, self.collection.what, error
            )

    def _decode(self, text: bytes | msgspec.Raw, kind: type[_Decoded]) -> _Decoded:
        """Decode an answer, or list again if it is none, for example the page of a proxy."""
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._version = ""
            raise ApiError(f"the answer cannot be read: {error}") from error

    def _report(self, error: ApiError | None = None) -> None:
        """Log each reason once, and say when the connection comes or goes."""
        complaint = "" if error is None else f"{error.status} {error}" if error.status else "unreachable"
        if complaint == self._complaint:
            return
        before, self._complaint, what = self._complaint, complaint, self.collection.what
        if error is not None:
            advice = _ADVICE.get(error.status, "")
            _log.error("cannot watch %s; the last known state stays in use: %s%s", what, error, advice)
        elif before:
            _log.info("watching %s works again", what)
        self.access.on_state(what, error is None)
