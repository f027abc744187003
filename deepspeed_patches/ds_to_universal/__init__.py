"""Convert a DeepSpeed ZeRO checkpoint to a universal one in one pass; a tool, not a fix: it edits nothing of upstream.

    python -m deepspeed_patches.ds_to_universal --input-folder IN/global_step10 --output-folder IN/universal

The way of a conversion, by modules: `command`, `convert`; `traits` (what DeepSpeed's converter
does); `read_headers` with `folder` (the files' headers, as `headers`); `conversion_plan` with `fragments`,
`merge`, `rules`, `layout` (pure: which bytes go where, as `output_files`); `output_folder` (the unfinished folder, and
how it becomes the finished one); `workers`, `write` with `source_files`, `new_file`, `file_systems`, `arithmetic` (the
bytes). Several ranks: `ckpt_patches.runtime.distributed`.
"""

from deepspeed_patches.ds_to_universal.convert import Options, Summary, convert

__all__ = ["Options", "Summary", "convert"]
