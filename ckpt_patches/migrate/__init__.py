"""Convert an old Megatron checkpoint to one that current releases load.

`old_checkpoint` reads the structure. `keys`, `settings`, `chunk_cover` and `migration_plan` are pure: they decide where
each byte goes before any is written. `move` copies and judges the bytes in one pass. `migrate` runs all steps.
"""
