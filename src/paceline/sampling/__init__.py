"""Logits to tokens: distributions, penalties, draws and the rules that verify drafts."""
