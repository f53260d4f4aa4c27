"""The names a request may call: the base model, under one or several names, and the LoRA adapters loaded on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from model_server.core.request import Adapter
from model_server.server.errors import ApiError, ModelNotFoundError


class ServedModels:
    def __init__(self, *, names: Sequence[str], root: str, adapters: Iterable[Adapter] = ()) -> None:
        """`names`: the first is the one in metrics. `root`: what the names stand for."""
        if not names or not all(names):
            raise ValueError("a served model needs a name")
        self.names = tuple(names)
        self.root = root
        self._adapters: dict[str, Adapter] = {}
        for adapter in adapters:
            self.load(adapter)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return tuple(self._adapters.values())

    def resolve(self, name: str | None) -> Adapter | None:
        """The adapter of that name, or None for the base model, which is also what no name means."""
        if name is None or name in self.names:
            return None
        try:
            return self._adapters[name]
        except KeyError:
            raise ModelNotFoundError(name) from None

    def load(self, adapter: Adapter) -> None:
        if not adapter.name:
            raise ApiError("An adapter needs a name.", param="lora_name")
        if adapter.name in self.names:
            raise ApiError(f"{adapter.name!r} is the base model's name.", param="lora_name")
        if adapter.name in self._adapters:
            raise ApiError(f"The adapter {adapter.name!r} is loaded already.", param="lora_name")
        self._adapters[adapter.name] = adapter

    def unload(self, name: str) -> None:
        """Requests under way finish; new ones do not find the name."""
        if name not in self._adapters:
            raise ModelNotFoundError(name)
        del self._adapters[name]
