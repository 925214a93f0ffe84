"""A small bidirectional encoder that says how much each prompt token matters (section IV-B)."""

from edgexpert.encoder.encoder import ImportanceEncoder

__all__ = ["ImportanceEncoder"]
