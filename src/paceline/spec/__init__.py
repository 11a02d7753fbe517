"""Proposers, the horizon and the verifier."""
