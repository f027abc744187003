"""Make of an old Megatron checkpoint one that today's releases load: its optimizer's state, cut and named as they do.

`source` (what is there, as the audit's readers find it), `keys` and `settings` (what becomes of the names, and of what
is not sharded), `cover` and `plan` (pure: which bytes go where, whole before one is written), `layout` (where in a file
of the output they lie), `move` (one pass over the bytes, which are judged on the way), `migrate` (from end to end),
`command`.
"""
