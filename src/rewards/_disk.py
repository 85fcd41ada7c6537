"""A folder of answers that several processes may fill and read at once."""

import json
import os
import tempfile
from pathlib import Path


def read_entry(folder: Path, key: str) -> str | None:
    """What is kept under `key`; None where nothing is, or nothing that can be read."""
    try:
        value = json.loads(_place(folder, key).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def write_entry(folder: Path, key: str, text: str) -> None:
    """Keep `text` under `key`. A reader sees the whole entry or none: it is written aside, then renamed."""
    place = _place(folder, key)
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=place.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(text).encode())
        os.replace(aside, place)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _place(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"
