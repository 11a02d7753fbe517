"""The scheduler, the step and the public engine."""
