"""Find out whether a checkpoint is whole: on the CPU, without torch, megatron or deepspeed, running none of its code.

A reader for each format (`zarr`, `torch_dist`, …) says where each array's bytes lie, `scan` reads each byte once,
`damages` is the closed list of what can be wrong, `audit` judges, `report` and `plot` tell, `repair` repairs a copy.
"""
