"""Convert an old Megatron checkpoint to one that current releases load.

`plan` decides where each byte goes before any is written. `output` copies the bytes. `migrate` plans, audits, copies,
and renames the complete output.
"""
