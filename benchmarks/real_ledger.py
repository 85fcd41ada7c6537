"""What the job on real input has done so far, on disk, and how long each stage may still take."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Clock:
    """Seconds that a stage may still use; asked between batches and steps, never inside one."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    @property
    def used(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        return self.seconds - self.used

    @property
    def share(self) -> float:
        """Share of the time that is used."""
        return min(1.0, self.used / self.seconds) if self.seconds > 0 else 1.0

    def fits(self, seconds: float) -> bool:
        """True if something that takes `seconds` still ends in time."""
        return seconds <= self.left


class Ledger:
    """Stages in order, each with its share of the minutes, its notes while it runs and its result when done.

    A stage gets its share of the time that the earlier ones left, so a fast stage hands on what it did not need
    and a slow one takes from all that follow. A rerun with the same settings continues at the first unfinished
    stage; with other settings it is refused, because half of the results would be of another job.
    """

    def __init__(self, folder: Path, minutes: float, shares: Mapping[str, float], settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "state.json"
        self.minutes = minutes
        self.shares = dict(shares)
        fresh = {"settings": dict(settings), "used": {}, "notes": {}, "results": {}}
        self.data: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else fresh
        if self.data["settings"] != fresh["settings"]:
            raise ValueError(
                f"{folder} holds a run with other settings ({self.data['settings']}, now {fresh['settings']}); "
                "give another --out, or --fresh to start again"
            )
        self._clock: Clock | None = None
        self._before = 0.0

    def open(self, stage: str) -> Clock:
        """Start or continue `stage`."""
        if stage not in self.shares:
            raise ValueError(f"stage {stage!r} is not one of {list(self.shares)}")
        left = 60 * self.minutes - sum(self.data["used"].values())
        waiting = sum(share for name, share in self.shares.items() if name not in self.data["results"])
        self._clock = Clock(max(0.0, left) * self.shares[stage] / waiting)
        self._before = self.data["used"].get(stage, 0.0)
        return self._clock

    def note(self, stage: str, **values: Any) -> None:
        """Keep `values` (and the time used so far) for a rerun that continues this stage."""
        self.data["notes"].setdefault(stage, {}).update(values)
        self._save(stage)

    def notes(self, stage: str) -> dict[str, Any]:
        return dict(self.data["notes"].get(stage, {}))

    def close(self, stage: str, result: Mapping[str, Any]) -> None:
        """Mark `stage` as done."""
        self.data["results"][stage] = dict(result)
        self._save(stage)

    def result(self, stage: str) -> dict[str, Any] | None:
        """The result of a finished stage, None before."""
        return self.data["results"].get(stage)

    def seconds(self, stage: str) -> float:
        return self.data["used"].get(stage, 0.0)

    def _save(self, stage: str) -> None:
        if self._clock is not None:
            self.data["used"][stage] = self._before + self._clock.used
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1))
        # Replaced whole: a run killed while writing leaves the old state, not half of the new one.
        part.replace(self.path)
