"""A stand-in for a model's tokenizer. It needs no vocabulary file, and cuts English into tokens of about four
characters.

Text is cut by one regular expression whose pieces are short and depend on nothing after them. So all tokens
of a text except the last one are also tokens of every longer text that starts with it, which a prefix cache
needs. (If a text ends inside a marker, a longer text may have other tokens from this marker on.) A token's id
is a hash of its piece. Ids cannot be turned back into text, except the ids of registered pieces (the words of
answers).

A marker such as `<|user|>` is always a single token.
"""

import re
from collections.abc import Iterator

import xxhash

from model_server.core.request import TokenId

PIECES = re.compile(
    r"<\|[a-z_]{1,24}\|>"  # markers
    r"| ?[^\W\d_]{1,6}"  # letters, with the space before them
    r"| ?\d{1,3}"
    r"| ?[^\w\s<]{1,3}"  # punctuation; < is a piece of its own, since it may begin a marker
    r"|<|_{1,4}"
    r"| {1,8}|[^\S ]{1,4}"  # runs of spaces; runs of other white space
)
LONGEST_PIECE_CHARACTERS = 28
"""The length of the longest marker. Other pieces have at most eight characters."""
_MAX_REMEMBERED_PIECES = 200_000

_AT_ONCE_CHARACTERS = 16 * 1024
"""A search holds Python's lock to its end, so a long text is searched in parts. Other threads get their turn
in between.
"""


class _PieceIds(dict[str, TokenId]):
    """Maps pieces to ids, and computes a missing id. So one `map` looks up a long text, in a third of the
    time of a loop.
    """

    def __missing__(self, piece: str) -> TokenId:
        token_id = self[piece] = TokenId(xxhash.xxh32_intdigest(piece.encode("utf-8", "surrogatepass")))
        return token_id


def _parts(text: str) -> Iterator[list[str]]:
    """Yield the pieces of a long text, part by part. The end of a part may cut a piece in two, so the next
    part starts before the last piece that may be cut.
    """
    start = 0
    while len(text) - start > _AT_ONCE_CHARACTERS:
        pieces = PIECES.findall(text, start, start + _AT_ONCE_CHARACTERS)
        doubtful = 0
        while doubtful < LONGEST_PIECE_CHARACTERS:
            doubtful += len(pieces.pop())
        start += _AT_ONCE_CHARACTERS - doubtful
        yield pieces
    yield PIECES.findall(text, start)


class Tokenizer:
    """Keeps only a bounded memo of known pieces. The results do not depend on this memo."""

    def __init__(self) -> None:
        self._ids = _PieceIds()
        self._pieces: dict[TokenId, str] = {}

    def encode(self, text: str) -> list[TokenId]:
        if len(self._ids) > _MAX_REMEMBERED_PIECES:
            self._ids.clear()
        if len(text) <= _AT_ONCE_CHARACTERS:
            return list(map(self._ids.__getitem__, PIECES.findall(text)))
        return [token for part in _parts(text) for token in map(self._ids.__getitem__, part)]

    def register(self, piece: str) -> TokenId:
        """Make one piece decodable and return its id. Raise ValueError if the text is not one piece."""
        found = self.encode(piece)
        if len(found) != 1:
            raise ValueError(f"{piece!r} is {len(found)} pieces, not one")
        self._pieces[found[0]] = piece
        return found[0]

    def decode(self, token_id: TokenId) -> str:
        """Return the registered piece of this id. Raise KeyError for any other id."""
        return self._pieces[token_id]
