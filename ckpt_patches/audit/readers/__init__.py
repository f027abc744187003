"""One reader per checkpoint format: converts files to arrays, shards and facts about the run."""
