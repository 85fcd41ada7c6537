"""The main job: warm up a model on good and wasteful tool use, then see what credit does to it.

    python -m benchmarks.quickstart            # the embedded office, a tiny MoE, minutes on two cores
    python -m benchmarks.quickstart --quick    # one seed and few steps, under two minutes
    python -m benchmarks.quickstart --model PATH --data bfcl

First, exactly: on one batch of real rollouts the summary noise is redrawn thousands of times, and the tool-token
gradient of GRPO and of SLCA is compared with what theory predicts. Then, as a race: both rules, and SLCA once more
with routing control, train the same checkpoint under the same noisy summary reward. Noise and length of the race come
from the variance theorem, the coefficients of routing control from one batch; both are printed before it starts, and
whatever comes out is reported.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import race as racing
from benchmarks.rollouts import Sizes, collect, make_trainer
from benchmarks.routing_arm import SHARE
from benchmarks.workload import Workload, office, real

REDRAWS = 4000
# Length of the race: a run without noise (one seed, one arm, so it compares nothing) closes 80 % of the gap between
# the warm checkpoint's process score and 1 in 20 to 25 steps of 64 rollouts at this learning rate. At a noise share
# of 0.9 theorem A.3 leaves GRPO about a quarter of that drift; the plan printed before the race says how far apart
# this puts the arms.
FULL = {"seeds": 3, "steps": 24, "warmup": 800, "conversations": 4000, "held_out": 96, "prompts": 8}
QUICK = {"seeds": 1, "steps": 3, "warmup": 150, "conversations": 1000, "held_out": 16, "prompts": 4}


def parser() -> argparse.ArgumentParser:
    """Options of the main job; what is left open takes its value from `FULL` or `QUICK`."""
    options = argparse.ArgumentParser(prog="benchmarks.quickstart", description=__doc__.split("\n")[0])
    options.add_argument("--quick", action="store_true", help="one seed, few steps")
    options.add_argument("--seeds", type=int, help="seeds of the race")
    options.add_argument("--steps", type=int, help="optimiser steps of each seed")
    options.add_argument("--sigma", type=float, help="sd of the summary noise (default: from --share)")
    options.add_argument("--share", type=float, default=0.9, help="wanted share of noise in the unified variance")
    options.add_argument("--warmup", type=int, help="supervised steps")
    options.add_argument("--conversations", type=int, help="most conversations to warm up with")
    options.add_argument("--held-out", type=int, help="most tasks to evaluate on")
    options.add_argument("--prompts", type=int, help="prompts a step")
    options.add_argument("--group", type=int, default=8, help="rollouts of each prompt")
    options.add_argument("--learning-rate", type=float, default=3e-4, help="of the race")
    options.add_argument("--warmup-rate", type=float, help="of the warm-up (3e-3; with --model 2e-5)")
    options.add_argument("--max-completion", type=int, default=128, help="tokens of a rollout, tool results included")
    options.add_argument("--max-prompt", type=int, default=768, help="rows with longer prompts are left out")
    options.add_argument("--gradient-memory", type=float, default=8.0, help="gigabytes for the exact experiment")
    options.add_argument("--model", help="folder or name of a Hugging Face model (default: a tiny one is built)")
    options.add_argument(
        "--routing-share",
        type=float,
        default=SHARE,
        help="size of the routing injection at the router weights, relative to the gradient there",
    )
    options.add_argument("--data", default="office", help="'office', 'bfcl', or a file of JSON lines")
    options.add_argument("--out", type=Path, default=Path("out/quickstart"), help="folder for everything written")
    return options


def settled(options: argparse.Namespace) -> argparse.Namespace:
    """Fill in what was left open."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    open_ends = {"sigma": None, "model": None, "warmup_rate": 2e-5 if options.model else 3e-3}
    return argparse.Namespace(**(open_ends | (QUICK if options.quick else FULL) | given))


@contextmanager
def bar(console: Any) -> Iterator[Any]:
    """A rich progress display."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        yield progress


def fresh_model(options: argparse.Namespace, workload: Workload) -> tuple[Any, Any]:
    """The model to warm up: the given one, or a tiny mixture of experts with a tokenizer of the task texts."""
    if options.model:
        from trl.chat_template_utils import supports_tool_calling

        from benchmarks.smollm import tool_tokenizer

        model, tokenizer = racing.load(options.model)
        return model, tokenizer if supports_tool_calling(tokenizer) else tool_tokenizer(tokenizer)
    from benchmarks.tiny import build_model, build_tokenizer, render

    values = workload.values
    if values:
        # The schemas stand in every prompt; a few copies are enough for their merges.
        conversations = [messages for messages, _ in workload.conversations[:1000]]
        texts = [*render(conversations), *render([conversations[0][:1]], workload.conversations[0][1]) * 20]
    else:
        texts = [text for messages, tools in workload.conversations[:400] for text in render([messages], tools)]
    tokenizer = build_tokenizer(texts, values, 1536 if values else 6144)
    return build_model(tokenizer), tokenizer


def warm_up(model: Any, tokenizer: Any, options: argparse.Namespace, workload: Workload, console: Any) -> list[float]:
    """Supervised warm-up in place, saved under `out/warm`; the loss of each step."""
    import torch

    from benchmarks import warmup

    with bar(console) as progress:
        chosen = workload.conversations[: options.conversations]
        task = progress.add_task("encode", total=len(chosen), note="")
        examples = []
        for messages, tools in chosen:
            examples.append(warmup.encode(messages, tools, tokenizer))
            progress.advance(task)
        task = progress.add_task("warm up", total=options.warmup, note="")
        losses = warmup.train(
            model.to("cuda" if torch.cuda.is_available() else "cpu"),
            examples,
            steps=options.warmup,
            learning_rate=options.warmup_rate,
            pad=tokenizer.pad_token_id,
            progress=lambda step, loss: progress.update(task, completed=step, note=f"loss {loss:.3f}"),
        )
    model.save_pretrained(options.out / "warm")
    tokenizer.save_pretrained(options.out / "warm")
    return losses


def main(arguments: list[str] | None = None) -> int:
    """Run the whole job and write its report."""
    options = settled(parser().parse_args(arguments))
    racing.quiet()
    from rich.console import Console

    from benchmarks import exact, report, routing_report
    from benchmarks.experiment import compare
    from benchmarks.plan import noise_plan

    console, started = Console(), time.perf_counter()
    if not console.is_terminal:
        console = Console(width=110)
    options.out.mkdir(parents=True, exist_ok=True)
    office_sizes = {"held_out": options.held_out, "warm": options.conversations}
    workload = office(**office_sizes) if options.data == "office" else real(options.data)
    model, tokenizer = fresh_model(options, workload)
    workload, dropped = workload.fitting(tokenizer, options.max_prompt, options.held_out)
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{type(model).__name__}, {size / 1e6:.2f} M parameters, {len(tokenizer)} tokens")
    console.print(f"{len(workload.train)} rows to train on, {len(workload.held_out)} held out, {dropped} too long")
    losses = warm_up(model, tokenizer, options, workload, console)
    sizes = Sizes(options.prompts, options.group, options.learning_rate, options.max_completion)
    common = {"sizes": sizes, "own_tools": workload.own_tools}
    trainer = make_trainer(
        model, tokenizer, workload.train, rule=racing.rule_of("GRPO"), output=options.out / "warm-trainer", **common
    )
    prompts = exact.affordable_prompts(model, 2 * sizes.prompts, sizes.group, options.gradient_memory)
    batch = collect(trainer, workload.train[:prompts], copies=sizes.group, seed=0)
    problem = exact.make_problem(model, batch)
    try:
        plan = noise_plan(problem, options.steps, share=options.share, sigma=options.sigma)
    except ValueError as error:
        raise SystemExit(f"no race: {error}; warm up longer (--warmup) or sample more (--group)") from error
    console.print(report.plan_table(plan, options.steps, sizes.rollouts))
    comparisons = compare(problem, plan.sigma, redraws=REDRAWS)
    console.print(report.exact_table(comparisons, REDRAWS))
    conflict = options.out / "conflict.html"
    found = report.save_conflict(conflict, batch, tokenizer, plan.sigma)

    steering = routing_report.settle_routing(
        model, tokenizer, batch, console, sigma=plan.sigma, share=options.routing_share, own_tools=workload.own_tools
    )
    race = racing.Race(
        checkpoint=str(options.out / "warm"),
        train_rows=workload.train,
        eval_rows=workload.held_out,
        sigma=plan.sigma,
        steps=options.steps,
        seeds=options.seeds,
        probes=exact.affordable_prompts(model, sizes.prompts, sizes.group, options.gradient_memory / len(racing.ARMS)),
        steering=steering,
        **common,
    )
    warm = racing.measure(trainer, race, "GRPO")
    results = run_race(race, options, console)
    console.print(report.race_table(warm, results))
    console.print(report.seeds_ahead(results))
    routing = routing_report.report_routing(steering, warm, results, options.out, console)
    console.print(report.NOTE)
    wall = time.perf_counter() - started
    report.save_curves(options.out / "curves.png", warm, results)
    report.save_json(
        options.out / "results.json",
        options=vars(options),
        plan=plan,
        exact=comparisons,
        warm=warm,
        summary=report.summarise(results),
        race=results,
        **routing,
        sizes=sizes,
        warmup_loss=losses,
        wall_seconds=wall,
    )
    pictures = [*(["conflict.html"] if found else []), *(["routing.png", "routing.html"] if routing else [])]
    written = ["results.json", "curves.png", *pictures]
    console.print(f"{wall:.0f} s; wrote {', '.join(str(options.out / name) for name in written)}")
    return 0


def run_race(race: racing.Race, options: argparse.Namespace, console: Any) -> dict[str, list[dict[str, Any]]]:
    """The race with one bar an arm."""
    with bar(console) as progress:
        bars = {arm: progress.add_task(arm, total=race.seeds * race.steps, note="starting") for arm in race.arms}

        def report_step(arm: str, seed: int, step: int, scores: dict[str, float]) -> None:
            note = f"seed {seed}: process {scores['process']:.2f}, summary {scores['summary']:.2f}"
            progress.update(bars[arm], completed=seed * race.steps + step, note=note)

        return racing.run(race, options.out / "race", report_step)


if __name__ == "__main__":
    raise SystemExit(main())
