"""Print a verdict: as a table, JSON or a page, with a sentence on what to do for each finding."""
