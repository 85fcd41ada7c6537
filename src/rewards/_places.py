"""Where the parts of a valid JSON text stand: members of an object, elements of a list, characters of a string."""

from collections.abc import Iterator

from rewards._json import scan_plainly, skip_space


def members(text: str, start: int) -> Iterator[tuple[str, int, int, int]]:
    """Members of the valid object at `start`: key, the key's span between its quotes, where its value begins."""
    at = skip_space(text, start + 1)
    while text[at] != "}":
        key, key_end = scan_plainly(text, at)
        begin = skip_space(text, skip_space(text, key_end) + 1)
        yield key, at + 1, key_end - 1, begin
        # Only now: who looks for one key does not pay for its value.
        at = skip_space(text, scan_plainly(text, begin)[1])
        if text[at] == ",":
            at = skip_space(text, at + 1)


def elements(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Where each element of the valid list at `start` begins and ends."""
    at = skip_space(text, start + 1)
    while text[at] != "]":
        end = scan_plainly(text, at)[1]
        yield at, end
        at = skip_space(text, end)
        if text[at] == ",":
            at = skip_space(text, at + 1)


def string_offsets(text: str, start: int, end: int) -> list[int]:
    """For a JSON string whose characters between the quotes are [start, end): where each decoded one begins.

    One more entry closes the list, so that characters [i, j) of the decoded string lie in [o[i], o[j]).
    """
    offsets, at = [], start
    while at < end:
        offsets.append(at)
        if text[at] != "\\":
            at += 1
        elif text[at + 1] != "u":
            at += 2
        else:
            # Two escapes of a surrogate pair are one character.
            pair = text[at + 2 : at + 4].lower() in ("d8", "d9", "da", "db") and text[at + 6 : at + 8] == "\\u"
            at += 12 if pair else 6
    return [*offsets, end]
