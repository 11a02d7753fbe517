"""Other engines in the same benchmark run: each in an environment of its own, fed the same token ids."""
