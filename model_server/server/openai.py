"""Reads request bodies of the OpenAI API once, checks them, and makes requests for the engine.

Fields that would change an answer and are not supported are refused and not ignored (`refused`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from model_server.core.request import Adapter, TokenId
from model_server.core.sampling import SamplingParams
from model_server.server.errors import ApiError, TooLongError
from model_server.server.models import ServedModels
from model_server.server.prompts import (
    ABSENT,
    FAULT_PLACE,
    MAX_LENGTHS,
    MAX_PROMPTS,
    MISSING_FIELD,
    PromptReader,
    given,
    option,
)
from model_server.server.refused import NEUTRAL, NEUTRAL_IN_CHAT, RefusedBody, check
from model_server.server.sampling import SamplingReader
from model_server.server.stops import StopRule
from model_server.server.structured import Form, forced_call, form_of
from model_server.text.language import Language

DEFAULT_COMPLETION_TOKENS = 16  # the API's default for completions; a chat answer may fill the model's length
_MOST_ANSWERS_OF_A_FORM = 8
_MAX_FIELDS = 2**20
"""A body may have this many colons. The decoder keeps the interpreter for itself, and takes some 40 ns for
each field, so a body of 5,000,000 fields would keep `/health` waiting for 0.2 s.
"""
_MAX_MARKS = 2**21
r"""A body may have this many commas, brackets and backslashes together. The decoder takes some 9 ns for a
number and its comma, and 25 ns for an escape like \u00e9.
"""
_PORTION_BYTES = 2**20
"""So many bytes are counted at a time. Between two portions other threads run."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Body(RefusedBody, kw_only=True):
    model: str | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    ignore_eos: bool | None = False
    max_tokens: int | None = None
    stop: msgspec.Raw = ABSENT
    include_stop_str_in_output: bool | None = False
    truncate_prompt_tokens: int | None = None
    response_format: msgspec.Raw = ABSENT
    structured_outputs: msgspec.Raw = ABSENT


class CompletionBody(_Body, kw_only=True):
    prompt: msgspec.Raw
    logprobs: int | None = None


class ChatBody(_Body, kw_only=True):
    messages: msgspec.Raw
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None


class TokenizeBody(msgspec.Struct):
    model: str | None = None
    prompt: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT


class DetokenizeBody(msgspec.Struct):
    tokens: msgspec.Raw
    model: str | None = None


class UnloadAdapterBody(msgspec.Struct):
    lora_name: str


class LoadAdapterBody(UnloadAdapterBody):
    lora_path: str


_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Stops = _Stop | Annotated[list[_Stop], msgspec.Meta(max_length=16)]
AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one HTTP request: each prompt becomes one engine request and one choice of the answer.

    If a client wants several answers to a prompt, the job holds the prompt once for each answer, one after
    the other.
    """

    chat: bool
    model: str
    adapter: Adapter | None
    prompts: tuple[list[TokenId], ...]
    answers_each: int
    max_tokens: int
    ignore_eos: bool
    cache_salt: str
    seeds: tuple[int, ...]
    """One seed for each prompt."""
    samplings: tuple[SamplingParams, ...]
    """The parameters for each prompt."""
    stream: bool
    include_usage: bool
    usage_in_each_event: bool
    stops: StopRule | None = None
    form: Form | None = None


def read_body(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    fields = marks = 0
    for start in range(0, len(raw), _PORTION_BYTES):
        portion = raw[start : start + _PORTION_BYTES]
        fields += portion.count(b":")
        marks += len(portion) - len(portion.translate(None, b",[{\\"))
        if fields > _MAX_FIELDS or marks > _MAX_MARKS:
            raise ApiError(
                f"The body has more than {_MAX_FIELDS:,} fields, or more than {_MAX_MARKS:,} commas, brackets "
                "and backslashes, the limits of this server."
            )
    try:  # as vLLM reads it: behind a byte order mark, and 4.0 and "4" are whole numbers
        return msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"), type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(f"The body cannot be read: {error}", param=_field_at_fault(str(error))) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"The body cannot be read: {error}") from error


def _field_at_fault(message: str) -> str | None:
    """Return the place of the error in the body, as msgspec writes it."""
    found = [match[1] for pattern in (FAULT_PLACE, MISSING_FIELD) if (match := pattern.search(message))]
    return ".".join(found).strip(".") or None


@dataclass(kw_only=True)
class RequestReader:
    """Turns bodies into jobs for one server, by the names, tokenizer and length of its model."""

    models: ServedModels
    language: Language
    sampling: SamplingReader
    max_len_tokens: int
    vocabulary_size: int | None = None
    """Tokens from this number on are refused, because the model lacks them. None refuses no token."""

    def __post_init__(self) -> None:
        made_up = self.sampling.made_up
        self.prompts = PromptReader(self.language, max_len_tokens=self.max_len_tokens, pictures=made_up)

    def completion(self, raw: bytes) -> Job:
        body = read_body(raw, CompletionBody)
        check(body, NEUTRAL)
        prompts = self.prompts.completion(body.prompt)
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return self._job(body, prompts, chat=False, max_tokens=max_tokens, num_logprobs=body.logprobs)

    def chat(self, raw: bytes) -> Job:
        body = read_body(raw, ChatBody)
        check(body, NEUTRAL_IN_CHAT)
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs=true.", param="top_logprobs")
        prompt = self.prompts.conversation(body)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        form = forced_call(body.tool_choice, body.tools)
        return self._job(
            body, [prompt], chat=True, max_tokens=max_tokens, num_logprobs=num_logprobs, form=form
        )

    def tokenize(self, raw: bytes) -> list[TokenId]:
        body = read_body(raw, TokenizeBody)
        self.models.resolve(body.model)
        if given(body.prompt) == given(body.messages):
            raise ApiError("Give either prompt or messages.", param="prompt")
        if given(body.prompt):
            return self.prompts.counted(body.prompt)
        return self.prompts.conversation(body)

    def detokenize(self, raw: bytes) -> str:
        body = read_body(raw, DetokenizeBody)
        self.models.resolve(body.model)
        return self.prompts.text_of(body.tokens)

    def _job(
        self,
        body: _Body,
        prompts: Sequence[list[TokenId]],
        *,
        chat: bool,
        max_tokens: int | None,
        num_logprobs: int | None,
        form: Form | None = None,
    ) -> Job:
        adapter = self.models.resolve(body.model)
        _check_options(body)
        if max_tokens is not None and max_tokens < 1:
            raise ApiError(f"max_tokens is {max_tokens}, but it must be at least 1.", param="max_tokens")
        if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
            raise ApiError(
                f"min_tokens is {body.min_tokens}, but max_tokens is {max_tokens}.", param="min_tokens"
            )
        form = form or form_of(body)
        if form is not None and body.min_tokens:
            raise ApiError(f"min_tokens is not supported beside {form.param}.", param="min_tokens")
        prompts = self._truncated(prompts, body.truncate_prompt_tokens, max_tokens)
        longest = max(map(len, prompts))
        self._check_length(longest, max_tokens)
        self._check_vocabulary(prompts)
        each = _answers_each(body, num_prompts=len(prompts))
        if form is not None and each * len(prompts) > _MOST_ANSWERS_OF_A_FORM:
            most = f"at most {_MOST_ANSWERS_OF_A_FORM} answers beside {form.param}"
            raise ApiError(f"One request may ask for {most}.", param="n")
        self._check_sum(each * sum(map(len, prompts)))
        seeds = tuple((body.seed or 0) + index for index in range(each)) * len(prompts)
        options = body.stream_options or StreamOptions()
        return Job(
            chat=chat,
            model=body.model or self.models.names[0],
            adapter=adapter,
            prompts=tuple(prompt for prompt in prompts for _ in range(each)),
            answers_each=each,
            max_tokens=max_tokens or self.max_len_tokens - longest,
            ignore_eos=bool(body.ignore_eos),
            cache_salt=body.cache_salt or "",
            seeds=seeds,
            samplings=self._samplings(body, seeds, num_logprobs=num_logprobs, answers_each=each),
            stream=bool(body.stream),
            include_usage=bool(options.include_usage),
            usage_in_each_event=bool(options.include_usage and options.continuous_usage_stats),
            stops=_stops(body),
            form=form,
        )

    def _samplings(
        self, body: _Body, seeds: Sequence[int], *, num_logprobs: int | None, answers_each: int
    ) -> tuple[SamplingParams, ...]:
        drawn = [None] * len(seeds) if body.seed is None else seeds
        found = self.sampling.read(body, num_logprobs=num_logprobs, seeds=drawn)
        if answers_each > 1 and not self.sampling.made_up and not found[0].temperature:
            raise ApiError("At temperature 0 all answers are the same: n must be 1.", param="n")
        return found

    def _truncated(
        self, prompts: Sequence[list[TokenId]], most: int | None, max_tokens: int | None
    ) -> Sequence[list[TokenId]]:
        """Return the last `most` tokens of each prompt. -1 means as many tokens as leave room for the answer,
        and None means all tokens.
        """
        if most is None:
            return prompts
        room = self.max_len_tokens - (max_tokens or 1)
        kept = room if most == -1 else most
        if kept < 1:
            raise ApiError(
                f"truncate_prompt_tokens is {most}: it must be -1 or at least 1, and the answer must leave room for one prompt token.",
                param="truncate_prompt_tokens",
            )
        return [prompt[-kept:] for prompt in prompts]

    def _check_length(self, prompt_tokens: int, max_tokens: int | None) -> None:
        if prompt_tokens + (max_tokens or 1) <= self.max_len_tokens:
            return
        answer = f", and its answer may have {max_tokens}" if max_tokens else ""
        raise TooLongError(
            f"This model's maximum context length is {self.max_len_tokens} tokens; "
            f"this request's prompt has {prompt_tokens} tokens{answer}. Shorten the prompt or lower max_tokens.",
            param="prompt",
        )

    def _check_sum(self, tokens: int) -> None:
        """Refuse too many answers. Each answer is a request of its own, and its blocks are hashed before it
        waits.
        """
        if tokens > MAX_LENGTHS * self.max_len_tokens:
            raise ApiError(
                f"The prompts of this request have {tokens} tokens, each prompt counted once for every answer to it. The limit is "
                f"{MAX_LENGTHS} times the model's {self.max_len_tokens} tokens. Send several smaller requests.",
                param="n",
            )

    def _check_vocabulary(self, prompts: Sequence[list[TokenId]]) -> None:
        size = self.vocabulary_size
        if size is not None and (largest := max(map(max, prompts))) >= size:
            raise ApiError(
                f"Token {largest} is out of the model's vocabulary, which ends at {size - 1}.", param="prompt"
            )


def _check_options(body: _Body) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream=true.", param="stream_options")


def _answers_each(body: _Body, *, num_prompts: int) -> int:
    each = 1 if body.n is None else body.n
    if each < 1:
        raise ApiError(f"n is {each}, but it must be at least 1.", param="n")
    if each * num_prompts > MAX_PROMPTS:
        raise ApiError(f"One request may ask for at most {MAX_PROMPTS} answers.", param="n")
    return each


def _stops(body: _Body) -> StopRule | None:
    stop: str | list[str] | None = option(body.stop, _Stops, param="stop")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if body.include_stop_str_in_output and given(body.stop_token_ids):
        raise ApiError(
            "include_stop_str_in_output is not supported beside stop_token_ids.",
            param="include_stop_str_in_output",
        )
    if not strings:
        return None
    return StopRule(strings, include=bool(body.include_stop_str_in_output))
