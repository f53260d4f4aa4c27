"""Makes up answers. The same prompt always gets the same words, and the same number of words.

Word and length depend only on the request's fingerprint and the position, so a preempted request continues
with the same words. Every token is one registered piece of the tokenizer. So if a client sends the answer's
text back in the next turn of a conversation, the text gives exactly the generated tokens, and the server
finds their blocks.
"""

import struct

import xxhash

from model_server.core.request import Request, TokenId
from model_server.text.tokenizer import Tokenizer

END_MARKER = "<|end|>"

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "st", "tr", "pl")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_CODAS = ("", "n", "r", "s", "l")
_WORDS = tuple(onset + vowel + coda for onset in _ONSETS for vowel in _VOWELS for coda in _CODAS)
_SENTENCE_TOKENS = 12


class Answers:
    def __init__(self, tokenizer: Tokenizer, *, mean_tokens: int) -> None:
        """`mean_tokens` is the mean length of an answer without a limit. Lengths are spread evenly from half
        of the mean to one and a half times the mean.
        """
        if mean_tokens < 1:
            raise ValueError("the mean answer has at least one token")
        self._shortest = max(1, mean_tokens // 2)
        self._longest = max(self._shortest, mean_tokens * 3 // 2)
        self._spaced = tuple(tokenizer.register(f" {word}") for word in _WORDS)
        self._unspaced = tuple(tokenizer.register(word) for word in _WORDS)
        self._newline = tokenizer.register("\n")
        self._stop = tokenizer.register(".")
        self.eos_token_id = tokenizer.register(END_MARKER)

    def next_token(self, request: Request) -> TokenId:
        """Return the token after the newest one, or the end marker when the answer is complete."""
        position = request.num_output_tokens
        if request.constraint is not None:
            [spelled] = request.constraint(request.token_ids[request.num_prompt_tokens :])
            return TokenId(spelled)
        length = max(self._length(request), request.sampling.min_tokens)
        if position >= length and not request.ignore_eos:
            return self.eos_token_id
        if position % _SENTENCE_TOKENS == _SENTENCE_TOKENS - 1:
            return self._stop
        words = self._unspaced if request.token_ids[-1] == self._newline else self._spaced
        draw = xxhash.xxh3_64_intdigest(struct.pack("<I", position), seed=request.fingerprint)
        return words[draw % len(words)]

    def _length(self, request: Request) -> int:
        return self._shortest + request.fingerprint % (self._longest - self._shortest + 1)
