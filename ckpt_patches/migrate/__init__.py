"""Convert an old Megatron checkpoint to one that today's releases load.

`old_checkpoint` reads the structure; `keys`, `settings`, `chunk_cover` and `migration_plan` are pure, and decide which
bytes go where before one is written; `move` copies and judges the bytes in one pass; `migrate` does it from end to end.
"""
