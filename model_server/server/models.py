"""The names that a request may give as its model. These are the names of the base model, and the names of the
LoRA adapters that are loaded on it.
"""

from collections.abc import Iterable, Sequence

from model_server.core.request import Adapter
from model_server.server.errors import ApiError, ModelNotFoundError

DEFAULT_MAX_ADAPTERS = 64
_MAX_NAME_CHARACTERS = 128
_MAX_PATH_CHARACTERS = 1024


class ServedModels:
    def __init__(
        self,
        *,
        names: Sequence[str],
        root: str,
        adapters: Iterable[Adapter] = (),
        max_adapters: int = DEFAULT_MAX_ADAPTERS,
    ) -> None:
        """The first of `names` is the name in metrics. `root` is the model behind the names. `max_adapters`
        is the most adapters at the same time.
        """
        if not names or not all(names):
            raise ValueError("a served model needs a name")
        self.names = tuple(names)
        self.root = root
        self._max_adapters = max_adapters
        self._adapters: dict[str, Adapter] = {}
        for adapter in adapters:
            self.load(adapter)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return tuple(self._adapters.values())

    def resolve(self, name: str | None) -> Adapter | None:
        """Return the adapter of this name. None means the base model. A request without a name gets the base
        model too.
        """
        if not name or name in self.names:
            return None
        try:
            return self._adapters[name]
        except KeyError:
            raise ModelNotFoundError(name) from None

    def _check(self, adapter: Adapter) -> None:
        """Raise ApiError if the adapter cannot have this name or path, or there is no room for it."""
        name = adapter.name
        for text, most, param in (
            (name, _MAX_NAME_CHARACTERS, "lora_name"),
            (adapter.path, _MAX_PATH_CHARACTERS, "lora_path"),
        ):
            if len(text) > most:
                raise ApiError(f"{param} must be at most {most} characters.", param=param)
        if not name:
            raise ApiError("An adapter needs a name.", param="lora_name")
        if name in self.names:
            raise ApiError(f"{name!r} is the base model's name.", param="lora_name")
        if name in self._adapters:
            raise ApiError(
                f"The adapter {name!r} is loaded already; unload it before you load another adapter under this name.",
                param="lora_name",
            )
        if len(self._adapters) >= self._max_adapters:
            raise ApiError(
                f"{self._max_adapters} adapters are loaded, and --max-adapters allows no more; unload an adapter first.",
                param="lora_name",
            )

    def load(self, adapter: Adapter) -> None:
        self._check(adapter)
        self._adapters[adapter.name] = adapter

    def unload(self, name: str) -> None:
        """Remove the adapter's name. Unfinished requests continue. New requests no longer find the name."""
        if self._adapters.pop(name, None) is None:
            raise ModelNotFoundError(name)
