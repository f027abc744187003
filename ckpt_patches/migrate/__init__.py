"""Convert an old Megatron checkpoint to one that current releases load.

`source` reads the structure. `keys`, `settings`, `parts` and `plan` are pure: they decide where each byte goes before
any is written. `output` copies the bytes. `migrate` plans, audits, copies, and renames the complete output.
"""
