"""The benchmark: agent coding tasks, arms, measures, statistics and the report."""
