"""What a rollout earned, component by component. Imports no torch; adapters do."""

from rewards.calls import ParsedCalls, ToolCall, parse_tool_calls, register_format
from rewards.formats import (
    parse_chat,
    parse_llama3_json,
    parse_message,
    parse_mistral,
    parse_pythonic,
    parse_qwen3_coder,
    type_arguments,
)
from rewards.gold import Accepted, Gold, GoldCall, GoldError, as_gold
from rewards.hermes import parse_hermes
from rewards.matching import loose_match
from rewards.outcomes import reference_rule, unified_total
from rewards.process import ProcessScore, ProcessWeights, process_score
from rewards.readers import read_bfcl, standard_types
from rewards.rows import RowError
from rewards.schema import Problem, ToolSchemaError, ToolSet, validate_call
from rewards.simulator import DeterministicMocker, Mocker, ToolResponse, answer_calls, simulate
from rewards.trajectories import Trajectory

__all__ = [
    "Accepted",
    "DeterministicMocker",
    "Gold",
    "GoldCall",
    "GoldError",
    "Mocker",
    "ParsedCalls",
    "Problem",
    "ProcessScore",
    "ProcessWeights",
    "RowError",
    "ToolCall",
    "ToolResponse",
    "ToolSchemaError",
    "ToolSet",
    "Trajectory",
    "answer_calls",
    "as_gold",
    "loose_match",
    "parse_chat",
    "parse_hermes",
    "parse_llama3_json",
    "parse_message",
    "parse_mistral",
    "parse_pythonic",
    "parse_qwen3_coder",
    "parse_tool_calls",
    "process_score",
    "read_bfcl",
    "reference_rule",
    "register_format",
    "simulate",
    "standard_types",
    "type_arguments",
    "unified_total",
    "validate_call",
]
