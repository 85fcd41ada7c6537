"""What every reader of rows shares: lines of JSON, and the report of a malformed one."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
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
