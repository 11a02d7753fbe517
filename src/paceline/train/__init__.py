"""Trains compact drafts for a target, from its own answers and from the structure of code."""
