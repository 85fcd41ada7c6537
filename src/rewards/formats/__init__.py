"""Call formats, each behind its name in the registry."""

from rewards.formats.chat import parse_chat, parse_message
from rewards.formats.hermes import parse_hermes
from rewards.formats.llama import parse_llama3_json
from rewards.formats.mistral import parse_mistral
from rewards.formats.pythonic import parse_pythonic
from rewards.formats.qwen_xml import parse_qwen3_coder, type_arguments

__all__ = [
    "parse_chat",
    "parse_hermes",
    "parse_llama3_json",
    "parse_message",
    "parse_mistral",
    "parse_pythonic",
    "parse_qwen3_coder",
    "type_arguments",
]
