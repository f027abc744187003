"""Print a verdict: as a table, JSON, a page or a plot, with a recommendation."""
