"""Packed checkpoints: quantised, channel-major weights that are read by mapping a file into memory."""
