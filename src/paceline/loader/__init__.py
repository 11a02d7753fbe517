"""Checkpoints in: where a model comes from, its numbers, its tokenizer and its chat template."""
