"""What a rollout earned, component by component. Imports no torch; adapters do."""

from rewards._lenient import Repair
from rewards.accepted import Accepted
from rewards.answers import outcome_reward, verify_answer, verify_answers
from rewards.baselines import ActionScore, PlannerScore, action_score, planner_score
from rewards.calls import ParsedCalls, ToolCall, parse_tool_calls, register_format
from rewards.decomposition import ContextAction, decompose, opening, split_by_conversation
from rewards.endpoint import ChatEndpoint, EndpointError
from rewards.formats import (
    parse_chat,
    parse_hermes,
    parse_llama3_json,
    parse_message,
    parse_mistral,
    parse_pythonic,
    parse_qwen3_coder,
    type_arguments,
)
from rewards.gold import Gold, GoldCall, GoldError, as_gold
from rewards.guard import GuardedScore, guard_omission
from rewards.judge import JudgeCounts, JudgeItem, JudgeResult, SummaryJudge, count_results, parse_rating
from rewards.lenient import LenientCalls, parse_lenient
from rewards.matching import loose_match
from rewards.mocker import LLMMocker
from rewards.outcomes import reference_rule, unified_total
from rewards.process import ProcessScore, ProcessWeights, process_score
from rewards.readers import (
    read_bfcl,
    read_chat,
    read_hermes,
    read_slca,
    read_toucan,
    read_xlam,
    standard_types,
)
from rewards.rows import RowError
from rewards.rule_judge import RuleJudge
from rewards.schema import Problem, ToolSchemaError, ToolSet, validate_call
from rewards.simulator import DeterministicMocker, Mocker, ToolResponse, answer_calls, simulate
from rewards.tool_space import ToolPool, WithinContext, hard_candidates, random_candidates
from rewards.trajectories import Trajectory
from rewards.verdicts import CompletenessJudge, SolvedJudge

__all__ = [
    "Accepted",
    "ActionScore",
    "ChatEndpoint",
    "CompletenessJudge",
    "ContextAction",
    "DeterministicMocker",
    "EndpointError",
    "Gold",
    "GoldCall",
    "GoldError",
    "GuardedScore",
    "JudgeCounts",
    "JudgeItem",
    "JudgeResult",
    "LLMMocker",
    "LenientCalls",
    "Mocker",
    "ParsedCalls",
    "PlannerScore",
    "Problem",
    "ProcessScore",
    "ProcessWeights",
    "Repair",
    "RowError",
    "RuleJudge",
    "SolvedJudge",
    "SummaryJudge",
    "ToolCall",
    "ToolPool",
    "ToolResponse",
    "ToolSchemaError",
    "ToolSet",
    "Trajectory",
    "WithinContext",
    "action_score",
    "answer_calls",
    "as_gold",
    "count_results",
    "decompose",
    "guard_omission",
    "hard_candidates",
    "loose_match",
    "opening",
    "outcome_reward",
    "parse_chat",
    "parse_hermes",
    "parse_lenient",
    "parse_llama3_json",
    "parse_message",
    "parse_mistral",
    "parse_pythonic",
    "parse_qwen3_coder",
    "parse_rating",
    "parse_tool_calls",
    "planner_score",
    "process_score",
    "random_candidates",
    "read_bfcl",
    "read_chat",
    "read_hermes",
    "read_slca",
    "read_toucan",
    "read_xlam",
    "reference_rule",
    "register_format",
    "simulate",
    "split_by_conversation",
    "standard_types",
    "type_arguments",
    "unified_total",
    "validate_call",
    "verify_answer",
    "verify_answers",
]
