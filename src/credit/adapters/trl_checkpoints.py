"""Checkpoints of a transformers ``Trainer`` that come back whole, whatever names their weights have on disk."""

import copy
from typing import Any

import torch


class WholeCheckpoints:
    """Mixin before a transformers ``Trainer``: resuming, and loading the best model, restore every weight.

    ``save_pretrained`` writes the names and shapes of the model hub, such as one matrix for each expert of a mixture
    of experts, while transformers 5.23 resumes by ``load_state_dict(strict=False)``: what goes by another name in
    memory, all experts of most families, keeps the weights that the run began with, and a warning is all that tells
    (huggingface/transformers issue 48805). Such a checkpoint is read again the way ``from_pretrained`` reads one.
    """

    model: Any
    state: Any
    _loading: str = ""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._loading = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        self._loading = self.state.best_model_checkpoint
        super()._load_best_model()  # type: ignore[misc]

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        if load_result.unexpected_keys:
            load_saved_model(self.model, self._loading)
        else:
            super()._issue_warnings_after_load(load_result)  # type: ignore[misc]


def load_saved_model(model: Any, checkpoint: str) -> None:
    """Copy the weights of a model saved by ``save_pretrained`` into ``model``, a transformers model like it.

    Args:
        model: keeps its own device, dtypes and ties.
        checkpoint: folder of the saved model.

    Raises:
        ValueError: a weight of ``model`` is missing there, or has another shape; the message names them.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    saved, report = type(model).from_pretrained(
        checkpoint,
        config=copy.deepcopy(model.config),  # loading writes to it
        dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32,  # holds each of them exactly
        output_loading_info=True,
    )
    lost = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if lost:
        raise ValueError(f"{checkpoint} does not hold these weights of {type(model).__name__}: {lost}")
    model.load_state_dict(saved.state_dict())
