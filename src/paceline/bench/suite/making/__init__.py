"""How the manifest is made: selection, and real runs of mutated code. Maintainers only; a user's build runs nothing."""
