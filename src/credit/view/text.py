"""Text of a token, made visible and harmless: no byte of a rollout may steer the screen that shows it."""

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple


class Piece(NamedTuple):
    """A stretch of display text and what it is.

    `"text"` is the token's own text, `"mark"` stands for something invisible (a space, a tab, a control
    character, a stray byte), and `"break"` is a line break that the token really holds.
    """

    text: str
    kind: Literal["text", "mark", "break"]


_MARKS = {" ": "·", "\t": "⇥", "\r": "␍", "\n": "⏎"}
# Control, format (bidi, zero width), surrogate, private use, unassigned, and every separator but the space.
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def visible(token: str | bytes) -> list[Piece]:
    r"""Display pieces of one token: nothing invisible is left out and nothing can act.

    Spaces, tabs and line ends become marks; control, bidirectional, zero-width and unassigned characters
    become `⟨U+202E⟩`; bytes that are not UTF-8 (half a character of byte-level BPE) become `\xe2`.

    Args:
        token: the token's text, or its bytes. Lone surrogates U+DC80…U+DCFF in a `str` are bytes too
            (`errors="surrogateescape"`).

    Returns:
        The pieces in order; no piece for an empty token.

    Reference: ours.

    Example:
        >>> visible(b"a \xe2\n")
        [Piece(text='a', kind='text'), Piece(text='·', kind='mark'), Piece(text='\\xe2', kind='mark'),
         Piece(text='⏎', kind='mark'), Piece(text='\n', kind='break')]
        >>> visible("\u202eevil")
        [Piece(text='⟨U+202E⟩', kind='mark'), Piece(text='evil', kind='text')]
    """
    return list(_merged(_characters(as_text(token))))


def as_text(token: str | bytes) -> str:
    r"""A token as `str`; bytes that are not UTF-8 become the surrogates U+DC80…U+DCFF, so that none is lost.

    Example:
        >>> as_text(b"\xc3\xa9\xff")
        'é\udcff'
    """
    return token.decode("utf-8", "surrogateescape") if isinstance(token, bytes) else token


def printable(text: str) -> str:
    r"""One line of harmless text for titles and tooltips: as `visible`, with plain spaces.

    Example:
        >>> printable("two\nlines \x1b[31m")
        'two⏎lines ⟨U+001B⟩[31m'
    """
    return "".join(" " if p.text == "·" and p.kind == "mark" else p.text for p in _spaced(text))


def byte_level_bytes(pieces: Iterable[str]) -> list[bytes]:
    r"""The bytes behind byte-level BPE vocabulary entries (GPT-2, Qwen, Llama 3: `"Ġhello"`).

    `tokenizer.decode` shows half a character as U+FFFD and so hides which bytes a token holds;
    `byte_level_bytes(tokenizer.convert_ids_to_tokens(ids))` keeps them. An entry with a character outside the
    byte alphabet (an added token) is kept as UTF-8.

    Args:
        pieces: vocabulary entries, one a token.

    Returns:
        One `bytes` a token.

    Reference: the byte alphabet of GPT-2's BPE.

    Example:
        >>> byte_level_bytes(["Ġcaf", "Ã", "©", "Ċ"])
        [b' caf', b'\xc3', b'\xa9', b'\n']
    """
    return [
        bytes(_BYTE_OF[c] for c in piece) if all(c in _BYTE_OF for c in piece) else piece.encode("utf-8")
        for piece in pieces
    ]


_COLOURS = ("#8b5cf6", "#0d9488", "#b7791f", "#db2777", "#65a30d", "#64748b")


def segment_colour(segment: int) -> str:
    """A colour for each segment, in the terminal and in HTML; neither the blue nor the red of the shades."""
    return _COLOURS[segment % len(_COLOURS)]


def _byte_alphabet() -> dict[str, int]:
    # Printable Latin-1 stands for itself; the other bytes take the next code points from U+0100 on, in order.
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = (b for b in range(256) if b not in own)
    return {chr(b): b for b in own} | {chr(0x100 + i): b for i, b in enumerate(moved)}


_BYTE_OF = _byte_alphabet()


def _spaced(text: str) -> Iterator[Piece]:
    return (piece for piece in _characters(text) if piece.kind != "break")


def _characters(text: str) -> Iterator[Piece]:
    for at, char in enumerate(text):
        code, category = ord(char), unicodedata.category(char)
        if char in _MARKS:
            yield Piece(_MARKS[char], "mark")
            if char == "\n":
                yield Piece("\n", "break")
        elif 0xDC80 <= code <= 0xDCFF:
            yield Piece(f"\\x{code - 0xDC00:02x}", "mark")
        elif category in _INVISIBLE:
            yield Piece(f"⟨U+{code:04X}⟩", "mark")
        elif at == 0 and category.startswith("M"):
            # Without a base of its own it would attach to the token before, or to our markup.
            yield Piece("◌" + char, "text")
        else:
            yield Piece(char, "text")


def _merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    held: Piece | None = None
    for piece in pieces:
        if held is not None and held.kind == piece.kind == "text":
            held = Piece(held.text + piece.text, "text")
            continue
        if held is not None:
            yield held
        held = piece
    if held is not None:
        yield held
