"""The entropy gate: routing control acts only while the policy's entropy is in a safe range."""

import torch
from torch import Tensor


class EntropyGate:
    """Opens the routing control while ``low <= H <= high``, where ``H`` is the mean entropy of the rollout batch.

    ``g = 1[H_low <= H <= H_high]``

    Args:
        low: lower end of the range.
        high: upper end; the paper trains stably at 0.2 and collapses late at 0.4.
        hysteresis: once closed, the gate opens again only when ``H`` is this far inside the range; 0, the
            default, is the paper's gate (ours otherwise).

    Raises:
        ValueError: if the range, shrunk by the hysteresis, is empty, or the hysteresis is negative.

    Reference: paper section 3.3.

    >>> gate = EntropyGate()
    >>> gate(0.1), gate(0.3), gate(float("nan"))
    (1.0, 0.0, 0.0)
    >>> gate.metrics()
    {'gate': 0.0, 'gate_entropy': nan, 'gate_open_share': 0.3333333333333333}
    """

    def __init__(self, low: float = 0.0, high: float = 0.2, *, hysteresis: float = 0.0) -> None:
        if not (hysteresis >= 0 and low + hysteresis <= high - hysteresis):
            raise ValueError(f"no entropy lies in [{low}, {high}] with a hysteresis of {hysteresis}")
        self.low = low
        self.high = high
        self.hysteresis = hysteresis
        self.is_open = True
        self.entropy = float("nan")
        self.calls = 0
        self.openings = 0

    def __call__(self, entropy: float | Tensor) -> float:
        """1.0 when open for a batch of this mean entropy, else 0.0. Give every rank the mean over all ranks.

        An entropy that is not a number closes the gate. A tensor is compared with the range in its own dtype.
        """
        self.entropy = float(entropy.detach() if isinstance(entropy, Tensor) else entropy)
        margin = 0.0 if self.is_open else self.hysteresis
        low, high = self.low + margin, self.high - margin
        if isinstance(entropy, Tensor) and entropy.is_floating_point():
            # 0.2 in float32 is above the float 0.2, yet it is the end of the range.
            low, high = torch.tensor([low, high], dtype=entropy.dtype).tolist()
        self.is_open = low <= self.entropy <= high
        self.calls += 1
        self.openings += self.is_open
        return float(self.is_open)

    def metrics(self) -> dict[str, float]:
        """State, entropy and share of open calls, for the trainer's log."""
        return {
            "gate": float(self.is_open),
            "gate_entropy": self.entropy,
            "gate_open_share": self.openings / self.calls if self.calls else float("nan"),
        }

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs to gate as the first one would have."""
        return {
            "is_open": float(self.is_open),
            "entropy": self.entropy,
            "calls": float(self.calls),
            "openings": float(self.openings),
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore :meth:`state_dict`."""
        self.is_open = bool(state["is_open"])
        self.entropy = float(state["entropy"])
        self.calls = int(state["calls"])
        self.openings = int(state["openings"])
