"""Find damage in checkpoints: on the CPU, without torch, megatron or deepspeed, and without running checkpoint code.

`ckpt_patches.formats` reads each format as shards: a main parameter with its moments and its weight. In `judging`,
`coverage` adds the tensors that no reader uses, `scan` reads each byte once, and `blocks` classifies odd elements, of
which `rules` makes findings. `record_checksums` and `recorded_states` verify checksums and fingerprints. `audit` runs
all steps, and `report` shows the results. `run_folder` finds the checkpoints of a run, and `unit` joins the parts of
one. `repair` writes a repaired copy, and `repair_list` lists the repaired elements. With several ranks
(`ckpt_patches.runtime.distributed`), each rank reads its share, and rank 0 judges.
"""
