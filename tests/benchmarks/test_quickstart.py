"""The main job, end to end and in its parts that need no training."""

import json
from pathlib import Path

import pytest

pytest.importorskip("trl")

from benchmarks import race as racing
from benchmarks.quickstart import FULL, QUICK, main, parser, settled
from benchmarks.report import mean_sd, seeds_ahead, summarise
from benchmarks.workload import real, serialised


@pytest.mark.timeout(600)
def test_quick_run_writes_tables_numbers_picture_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--quick", "--warmup", "80", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    titles = ("Noise plan", "Exact experiment", "Routing control", "Held-out tasks after the race")
    for title in (*titles, "Jaccard of adjacent tokens", "gate open, share of steps", "one seed cannot tell"):
        assert title in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["warmup_loss"][-1] < results["warmup_loss"][0] / 2
    assert results["warm"]["process"] > 0.1
    assert [line["holds"] for line in results["exact"] if line["theory"] == "exact"] == [True] * 6
    assert results["plan"]["share"] == pytest.approx(0.9)
    for arm in racing.ARMS:
        runs = results["race"][arm]
        assert [run["seed"] for run in runs] == [0]
        assert len(runs[0]["curve"]) == QUICK["steps"]
        assert set(runs[0]["final"]["kinds"]) <= {"single", "parallel", "sequential", "none"}
    grpo, slca, routed = (results["race"][arm][0]["final"] for arm in racing.ARMS)
    assert slca["noise_variance"] == routed["noise_variance"] == 0.0 < grpo["noise_variance"]
    # One seed of every arm starts from the same prompts and samples: the first batch is the same.
    first = [results["race"][arm][0]["curve"][0] for arm in racing.ARMS]
    assert first[0]["process"] == first[1]["process"] == first[2]["process"]
    # The injection starts with the first step and changes the second.
    assert results["race"]["SLCA"][0]["curve"] != results["race"][racing.ROUTED][0]["curve"]
    steering = results["steering"]
    assert steering["lambda_turn"] == pytest.approx(10 * steering["lambda_token"])
    for step in results["race"][racing.ROUTED][0]["curve"]:
        assert step["routing/gate"] == float(step["routing/gate_entropy"] <= steering["high"])
        assert "routing/survived" in step or not step["routing/gate"]
    for measured in (results["warm"], grpo, slca, routed):
        assert 0 < measured["routing"]["jaccard"] < 1
        assert measured["routing"]["turns_tool"] >= 8
    assert len(results["claims"]) == 5
    assert results["routing_report"]["routing/warm/jaccard"] == results["warm"]["routing"]["jaccard"]
    assert (tmp_path / "routing.png").stat().st_size > 10_000
    assert all(arm in (tmp_path / "routing.html").read_text() for arm in ("warm", *racing.ARMS))
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    page = (tmp_path / "conflict.html").read_text()
    assert all(word in page for word in ("GRPO", "SLCA", "noise"))


def test_options_left_open_take_the_full_or_the_quick_values():
    full, quick = settled(parser().parse_args([])), settled(parser().parse_args(["--quick", "--steps", "9"]))
    assert {name: vars(full)[name] for name in FULL} == FULL
    assert (quick.seeds, quick.steps, quick.sigma) == (QUICK["seeds"], 9, None)
    assert settled(parser().parse_args(["--model", "x"])).warmup_rate < full.warmup_rate


def test_mean_and_deviation_over_seeds():
    assert mean_sd([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert mean_sd([1.0]) == (1.0, 0.0)

    def run(process: float) -> dict[str, object]:
        kinds = {"single": {"process": process}}
        curve = [{"grad_norm": 1.0}, {"grad_norm": 3.0}]
        final = {"process": process, "kinds": kinds, "routing": {}}
        return {"final": final, "wall_seconds": 5.0, "cpu_seconds": 4.0, "curve": curve}

    summary = summarise({"SLCA": [run(0.0), run(1.0)]})["SLCA"]
    assert summary["process"] == summary["process/single"] == (0.5, pytest.approx(0.5**0.5))
    assert summary["norm_deviation"] == (pytest.approx(2**0.5), 0.0)
    line = seeds_ahead({"GRPO": [run(0.5), run(0.5)], "SLCA": [run(0.4), run(0.8)]})
    assert "+0.100" in line
    assert "1 of 2" in line


def test_sparse_and_dense_models_load(tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer(["<|im_start|>user\nhello<|im_end|>\n"], vocab_size=300)
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    for name, model in (("sparse", build_model(tokenizer, hidden=16)), ("dense", dense)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        loaded, reread = racing.load(str(tmp_path / name))
        assert type(loaded) is type(model)
        assert reread.chat_template == tokenizer.chat_template
        assert reread.response_template == tokenizer.response_template
    assert racing.load(str(tmp_path / "sparse"))[0].config._experts_implementation == "grouped_mm"


def test_an_arm_that_fails_is_an_error_that_says_why(tmp_path: Path):
    broken = racing.Race(str(tmp_path / "nowhere"), [], [], sigma=0.0, steps=1, seeds=1)
    with pytest.raises(RuntimeError, match="nowhere"):
        racing.run(broken, tmp_path, lambda *_: None)


def row(number: int, **changes: object) -> str:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
    }
    cells = {
        "prompt": [{"role": "user", "content": f"double {number} and {number + 1}"}],
        "tools": [{"type": "function", "function": {"name": "double", "parameters": schema}}],
        "gold": [[{"name": "double", "arguments": {"n": number + i}} for i in range(2)]],
    }
    return json.dumps({**cells, **changes})


def test_a_file_of_rows_is_split_answered_and_wasted_by_halves(tmp_path: Path):
    from benchmarks.scoring import score_rollout

    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(row(number) for number in range(60)) + "\n\n")
    workload = real(str(file))
    assert workload.own_tools
    assert len(workload.train) + len(workload.held_out) == 60
    assert not {str(r["prompt"]) for r in workload.train} & {str(r["prompt"]) for r in workload.held_out}
    gold = {str(r["prompt"][0]["content"]): json.loads(r["gold"]) for r in workload.train}
    scores = [
        score_rollout(messages[1:], gold[messages[0]["content"]], tools) for messages, tools in workload.conversations
    ]
    assert {score.success for score in scores} == {0.0, 1.0}
    assert all(score.summary == 1.0 for score in scores)


def test_a_bad_row_is_named(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text(row(1) + "\n" + json.dumps({"prompt": []}) + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2.*tools"):
        real(str(file))


def test_the_wasteful_way_keeps_every_answer_with_its_call():
    def call(name: str) -> dict[str, object]:
        return {"type": "function", "function": {"name": name, "arguments": {}}}

    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "1 2"},
    ]

    def steps(conversation: list[dict[str, object]]) -> list[str]:
        return [
            "".join(c["function"]["name"] for c in m.get("tool_calls", [])) or str(m["content"]) for m in conversation
        ]

    assert steps(serialised(messages)) == ["?", "a", "1", "a", "1", "b", "2", "1 2"]
    single = [messages[0], {**messages[1], "tool_calls": [call("a")]}, messages[2], messages[4]]
    assert steps(serialised(single)) == ["?", "aa", "1", "1", "1 2"]
    assert serialised([messages[0], messages[4]]) == [messages[0], messages[4]]
