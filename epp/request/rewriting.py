"""Other names for models: replaces the name that a client sent by one target, or by one of several targets
with weights.

`Rewrites` decides; `with_model` changes a body. All turns of a conversation have the same target. It depends
on the session, or without a session on the prompt up to the end of its first user message, which all turns
share. For a prompt without messages it depends on the first `_OPENING_BYTES`. The same request has the same
target in every picker. Only one rule applies to a request; a target is not looked up again. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct
from xxhash import xxh3_64_intdigest

from epp.base.errors import BadRequestError
from epp.base.types import InferenceRequest
from epp.request.canonical import BODY, SECTION
from epp.request.client_names import MAX_NAME_CHARS, is_form, model_in_form
from epp.request.jsontext import places_of, too_costly

_OPENING_BYTES: Final = 4096
_USER: Final = SECTION + b"user" + BODY
_DECODE: Final = msgspec.json.Decoder(dict[str, Raw])


BoundedName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class RewriteTarget(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    model: BoundedName
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


class Rewrite(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Requests for one of `models` go to one of the targets. If `models` is empty, the rule is for every
    model that no other rule names. The bounds are those of the endpoints file, which is decoded into this.
    """

    targets: Annotated[tuple[RewriteTarget, ...], Meta(min_length=1, max_length=64)]
    models: Annotated[tuple[BoundedName, ...], Meta(max_length=1024)] = ()


class Rewrites:
    """If two of `rules` name the same model, the first one counts. The same holds for two rules without
    models.
    """

    def __init__(self, rules: Iterable[Rewrite] = ()) -> None:
        self._exact: dict[str, Sequence[RewriteTarget]] = {}
        self._others: Sequence[RewriteTarget] = ()
        for rule in rules:
            if not rule.models:
                self._others = self._others or rule.targets
            for model in rule.models:
                self._exact.setdefault(model, rule.targets)

    def __bool__(self) -> bool:
        return bool(self._exact or self._others)

    @property
    def aliases(self) -> Mapping[str, frozenset[str]]:
        """Return the names that clients may use although no server has them, each with its targets."""
        return {name: frozenset(target.model for target in targets) for name, targets in self._exact.items()}

    def target(self, inference: InferenceRequest, *, session: str, request_id: str) -> str:
        """Return the model to ask for. It is the request's own model if no rule applies."""
        model = inference.model
        targets = self._exact.get(model, self._others)
        if not targets:
            return model
        if len(targets) == 1:
            return targets[0].model
        key = (
            session.encode("utf-8", "surrogatepass")
            or _opening(inference)
            or request_id.encode("utf-8", "replace")
        )
        drawn = xxh3_64_intdigest(key, xxh3_64_intdigest(model.encode("utf-8", "surrogatepass")))
        ends = list(accumulate(target.weight for target in targets))
        at = drawn * ends[-1] >> 64
        return next(target.model for target, end in zip(targets, ends, strict=True) if at < end)


def _opening(inference: InferenceRequest) -> bytes:
    """Return the bytes with which all turns of a conversation begin."""
    prompt = inference.prompt
    at = -1 if inference.token_ids else prompt.find(_USER)
    if at < 0:
        return prompt[:_OPENING_BYTES]
    end = prompt.find(SECTION, at + len(_USER))
    return prompt if end < 0 else prompt[:end]


def with_model(body: bytes | memoryview, *, model: str) -> bytes:
    """Return the body with another value of `model`. All other bytes stay unchanged.

    If the body has no model, or one that is no text, the object is written again, field by field. Raises
    BadRequestError if this is not possible.
    """
    if is_form(body) and (place := model_in_form(body)) is not None:
        return b"".join((body[: place[0]], model.encode(), body[place[1] :]))
    name = msgspec.json.encode(model)
    [found] = places_of(body, "model")
    if found.start < found.stop:
        return b"".join((body[: found.start], name, body[found.stop :]))
    try:
        fields = None if too_costly(body) else _DECODE.decode(bytes(body).removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = None
    if fields is None:
        raise BadRequestError("The body has no `model` to replace; write one, as a text.", reason="bad_json")
    return msgspec.json.encode({**fields, "model": Raw(name)})
