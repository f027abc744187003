"""The explorer: configurations of real trainings that nobody listed, saved, loaded and judged."""
