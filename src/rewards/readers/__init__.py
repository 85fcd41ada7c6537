"""Rows as they lie on disk. A malformed row is reported with its file and line, and the rest goes on."""

from rewards.readers.bfcl import read_bfcl, standard_types
from rewards.readers.chat import read_chat, read_slca
from rewards.readers.hermes import read_hermes
from rewards.readers.toucan import read_toucan
from rewards.readers.xlam import read_xlam

__all__ = ["read_bfcl", "read_chat", "read_hermes", "read_slca", "read_toucan", "read_xlam", "standard_types"]
