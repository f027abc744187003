"""One reader per checkpoint format: from its files to arrays, shards and facts about the run."""
