"""The race: the same warm checkpoint, trained with GRPO, with SLCA, and with SLCA under routing control.

One process an arm, one thread each, all seeds in it one after another. All arms meet the same prompts, sampling
seeds and noise generator.
"""

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from benchmarks.rollouts import Sizes
from benchmarks.routing_arm import Steering

ROUTED = "SLCA + routing"
ARMS = ("GRPO", "SLCA", ROUTED)
Report = Callable[[str, int, int, dict[str, float]], None]


@dataclass(frozen=True)
class Race:
    """Everything an arm needs, picklable.

    Attributes:
        checkpoint: folder of the warm model and its tokenizer.
        train_rows: rows to train on.
        eval_rows: held-out rows.
        sigma: noise on the summary reward.
        steps: optimiser steps a seed.
        seeds: how many seeds.
        sizes: of one step.
        own_tools: rows bring their own tools.
        copies: rollouts of each held-out row.
        probes: training rows for the variance of the tool-token gradient.
        steering: coefficients of the arm with routing control; None for a model without routers that can be steered,
            which leaves that arm and the routing metrics out.
    """

    checkpoint: str
    train_rows: Sequence[dict[str, Any]]
    eval_rows: Sequence[dict[str, Any]]
    sigma: float
    steps: int
    seeds: int
    sizes: Sizes = field(default_factory=Sizes)
    own_tools: bool = False
    copies: int = 4
    probes: int = 8
    steering: Steering | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(arm for arm in ARMS if arm != ROUTED or self.steering is not None)


def quiet(threads: int = 1) -> None:
    """One voice: no warnings, no library progress bars, no network, and a fixed number of threads."""
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    warnings.filterwarnings("ignore")
    import datasets
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)


def load(checkpoint: str) -> tuple[Any, Any]:
    """Model in float32 and tokenizer of a saved folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # A mixture of experts takes "grouped_mm" where it can by itself; asking for it would refuse dense models.
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(checkpoint)


def rule_of(arm: str) -> Any:
    """The credit rule of an arm, with the paper's weights (all 1)."""
    import credit

    return {"GRPO": credit.GRPO, "SLCA": credit.SLCA, ROUTED: credit.SLCA}[arm]()


def measure(trainer: Any, race: Race, arm: str, seed: int = 0) -> dict[str, Any]:
    """Held-out scores and routing of the trainer's model, and the variance of its tool gradient under `arm`'s rule.

    `gradient_variance` is taken over prompts, rollouts and noise; `noise_variance` is its conditional part, over the
    noise alone (theorem A.3). `routing` is `measure_routing` of the held-out rollouts, empty without `race.steering`.
    """
    from benchmarks import exact
    from benchmarks.rollouts import collect
    from benchmarks.routing_measure import measure_routing
    from benchmarks.scoring import mean_scores

    held_out = collect(trainer, race.eval_rows, copies=race.copies, seed=1000)
    batch = collect(trainer, race.train_rows[: race.probes], copies=race.sizes.group, seed=2000)
    problem = exact.make_problem(trainer.model, batch)
    advantages = exact.tool_advantages(problem, rule_of(arm), exact.redraw(problem, race.sigma, 500, seed))
    kinds = [row.get("kind", "all") for row in held_out.rows]
    routing = {}
    if race.steering is not None:
        routing = measure_routing(trainer.model, trainer.processing_class, held_out, own_tools=race.own_tools)
    return {
        **mean_scores(held_out.scores),
        "gradient_variance": exact.group_variance(advantages, problem),
        "noise_variance": exact.trace_variance(advantages, problem)[0],
        "kinds": {
            kind: mean_scores([s for s, k in zip(held_out.scores, kinds, strict=True) if k == kind])
            for kind in sorted(set(kinds))
        },
        "routing": routing,
    }


def run_seed(race: Race, arm: str, seed: int, output: str, report: Report) -> dict[str, Any]:
    """Train one arm from one seed and measure it: curves, final metrics, time of the training alone.

    `cpu_seconds` compares arms even where there are more of them than cores; `wall_seconds` does not.
    """
    from transformers import TrainerCallback

    from benchmarks.rollouts import make_trainer
    from benchmarks.routing_arm import make_routing

    class Curve(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "grad_norm" in logs:
                names = [name for name in logs if name == "grad_norm" or name.startswith("routing/")]
                logged.append({name: float(logs[name]) for name in names})

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report(arm, seed, state.global_step, trainer.score_log.history[-1])

    logged: list[dict[str, float]] = []
    model, tokenizer = load(race.checkpoint)
    steered = arm == ROUTED and race.steering is not None
    trainer = make_trainer(
        model,
        tokenizer,
        race.train_rows,
        rule=rule_of(arm),
        sizes=race.sizes,
        sigma=race.sigma,
        steps=race.steps,
        seed=seed,
        own_tools=race.own_tools,
        output=output,
        callbacks=[Curve()],
        routing=make_routing(model, race.steering) if steered else None,
    )
    started, worked = time.perf_counter(), time.process_time()
    trainer.train()
    took = {"wall_seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - worked}
    if steered:
        trainer.routing.control.detach()
    curve = [{**scores, **step} for scores, step in zip(trainer.score_log.history, logged, strict=True)]
    return {"seed": seed, **took, "curve": curve, "final": measure(trainer, race, arm)}


def _arm(race: Race, arm: str, output: str, queue: Any) -> None:
    try:
        quiet()
        for seed in range(race.seeds):
            result = run_seed(race, arm, seed, output, lambda *event: queue.put(("step", event)))
            queue.put(("seed", (arm, result)))
        queue.put(("done", (arm, None)))
    except BaseException as error:  # the parent must hear of it, whatever it is
        import traceback

        queue.put(("error", (arm, "".join(traceback.format_exception(error)))))


def run(race: Race, output: Path, report: Report) -> dict[str, list[dict[str, Any]]]:
    """Run the arms side by side.

    Args:
        race: what to run.
        output: folder for the trainers' files.
        report: called with arm, seed, step and the scores of the step's rollouts.

    Returns:
        For each arm, one result a seed; see `run_seed`.

    Raises:
        RuntimeError: an arm failed; the message holds its traceback.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = {
        arm: context.Process(target=_arm, args=(race, arm, str(output / arm), queue), daemon=True) for arm in race.arms
    }
    for worker in workers.values():
        worker.start()
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in race.arms}
    running = set(race.arms)
    try:
        while running:
            kind, event = _next(queue, workers, running)
            if kind == "step":
                report(*event)
            elif kind == "seed":
                results[event[0]].append(event[1])
            elif kind == "done":
                running.discard(event[0])
            else:
                raise RuntimeError(f"arm {event[0]} failed:\n{event[1]}")
    finally:
        for worker in workers.values():
            if worker.is_alive() and running:
                worker.terminate()
            worker.join()
    return results


def _next(queue: Any, workers: dict[str, Any], running: set[str]) -> Any:
    """The next event; an arm that died without a word (out of memory, say) is an error, not a wait without end."""
    while True:
        try:
            return queue.get(timeout=5.0)
        except Empty:
            dead = [arm for arm in running if not workers[arm].is_alive()]
            if dead and queue.empty():
                return "error", (dead[0], f"its process ended with exit code {workers[dead[0]].exitcode}")
