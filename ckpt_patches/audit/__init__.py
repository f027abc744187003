"""Find out whether a checkpoint is whole: on the CPU, without torch, megatron or deepspeed, running none of its code.

What a format looks like is known by `ckpt_patches.formats`. Here a reader for each (`zarr`, `torch_dist`, `zero`, …)
makes shards of it: a master with its moments and its weight; `coverage` adds what no reader has a place for. `scan`
reads each byte once, `blocks` says what is odd about an element, `judge` with `holes` what that means, `checksums`
what the files' own say, `quantized` whether a weight is of 8 bits, `remainders` whether masters are what bf16 weights
lack, `shifted` with `ways` whether all of it lies in the wrong place.
`damages` is the closed list of what can be wrong, `audit` puts it together, `report` shows it,
`plot` draws what `bars` plans, and `page` (written with `markup`) has that and what to do (`advice`).
`repair` with `unshift` and `copies` repairs a copy, and `repaired` is the list of what was. Of several ranks
(`ckpt_patches.runtime.distributed`) each reads its share (`shares`), and rank 0 judges.
"""
