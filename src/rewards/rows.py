"""What every reader of rows shares: JSON lines, a JSON array or parquet, row by row, and the report of a bad one."""

import gzip
import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from os import PathLike
from pathlib import Path
from typing import Any

_CHUNK = 1 << 16
# A literal or an escape that the end of a chunk cuts is reported at its beginning.
_LONGEST_TOKEN = 16
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_PARQUET_BATCH = 256
Rows = str | PathLike[str] | Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class RowError:
    """A row that could not be read, and why."""

    file: str
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.field}: {self.message}"


class MalformedRowError(ValueError):
    """Raised where the fault is found, turned into a `RowError` where file and line are known."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


Report = Callable[[RowError], None]


def warn_of_row(error: RowError) -> None:
    """The default report: a warning."""
    warnings.warn(f"skipped {error}", stacklevel=3)


def read_lines(file: Path, on_error: Report) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a file of JSON lines, with their line numbers."""
    with _text(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if not _is_utf8(line):
                on_error(RowError(str(file), number, "row", "not UTF-8"))
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                on_error(RowError(str(file), number, "row", f"not JSON: {error}"))
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                on_error(RowError(str(file), number, "row", f"expected an object, got {type(row).__name__}"))


def read_rows(rows: Rows, on_error: Report) -> Iterator[tuple[str, str, int, Mapping[str, Any]]]:
    """File, its short name, line and object of each row of a file, or of rows that are in memory already.

    A parquet file is known by its first bytes; of others, one that begins with `[` is one JSON array, read element by
    element, and any other JSON lines, gzipped or not. A fault in an array ends it, for nothing says where the next
    element begins; a fault in a line ends the line. The line of a parquet row is its number.
    """
    if not isinstance(rows, (str, PathLike)):
        for index, row in enumerate(rows, start=1):
            if isinstance(row, Mapping):
                yield "rows", "rows", index, row
            else:
                on_error(RowError("rows", index, "row", f"expected an object, got {type(row).__name__}"))
        return
    file, line = Path(rows), 0
    try:
        for line, row in _reader(file)(file, on_error):
            yield str(file), file.name, line, row
    except (EOFError, zlib.error) as error:
        on_error(RowError(str(file), line + 1, "row", f"the compressed file is not whole: {error}"))


def _reader(file: Path) -> Callable[[Path, Report], Iterator[tuple[int, Mapping[str, Any]]]]:
    if _begins(file, _PARQUET):
        return read_parquet
    with _text(file, "replace") as text:
        return read_array if _first_sign(text) == "[" else read_lines


def _begins(file: Path, magic: bytes) -> bool:
    with file.open("rb") as start:
        return start.read(len(magic)) == magic


def _text(file: Path, errors: str = "surrogateescape") -> TextIOWrapper:
    """The text of a file, gzipped or not."""
    if _begins(file, _GZIP):
        return gzip.open(file, "rt", encoding="utf-8-sig", errors=errors)
    return file.open(encoding="utf-8-sig", errors=errors)


def read_parquet(file: Path, on_error: Report) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a parquet file with their numbers, batch by batch."""
    try:
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError(f"{file}: reading parquet needs pyarrow: pip install pyarrow") from error
    try:
        table = ParquetFile(file)
    except ValueError as error:
        raise OSError(f"{file}: not a whole parquet file: {error}") from error
    with table:
        batches = table.iter_batches(batch_size=_PARQUET_BATCH)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def _first_sign(text: TextIOWrapper) -> str:
    while sign := text.read(1):
        if not sign.isspace():
            # A line may hold a list too, and then it is a malformed row: an array's first element is an object.
            rest = text.read(256).lstrip() if sign == "[" else ""
            return sign if sign != "[" or rest[:1] in ("{", "]", "") else "?"
    return ""


def read_array(file: Path, on_error: Report) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a file that holds one JSON array, with the lines where they begin; never the whole file."""
    decoder = json.JSONDecoder()
    with _text(file) as text:
        buffer, line, size = text.read(_CHUNK), 1, _CHUNK
        line += buffer[: buffer.index("[")].count("\n")
        buffer = buffer[buffer.index("[") + 1 :]
        while True:
            rest = buffer.lstrip(" \t\r\n,")
            line += buffer[: len(buffer) - len(rest)].count("\n")
            buffer = rest
            if buffer.startswith("]"):
                if (buffer[1:] + text.read(_CHUNK)).strip():
                    on_error(RowError(str(file), line, "row", "text after the end of the array is not read"))
                return
            try:
                row, end = decoder.raw_decode(buffer)
            except (ValueError, RecursionError) as error:
                # The element may go on beyond the buffer. Twice as much each time, so a long one costs linear time.
                more = text.read(size) if _may_go_on(error, len(buffer)) else ""
                if not more:
                    on_error(RowError(str(file), line, "row", f"not JSON, and the rest is not read: {error}"))
                    return
                buffer, size = buffer + more, 2 * size
                continue
            size = _CHUNK
            if not _is_utf8(buffer[:end]):
                on_error(RowError(str(file), line, "row", "not UTF-8"))
            elif isinstance(row, dict):
                yield line, row
            else:
                on_error(RowError(str(file), line, "row", f"expected an object, got {type(row).__name__}"))
            line += buffer[:end].count("\n")
            buffer = buffer[end:]


def _is_utf8(text: str) -> bool:
    """Whether no byte had to be escaped when it was read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _may_go_on(error: Exception, length: int) -> bool:
    """Whether more text could cure the error: it lies at the end of what was read, or in a string without an end."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.pos > length - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
