"""`edgexpert convert`: from any checkpoint to a packed one, and back."""
