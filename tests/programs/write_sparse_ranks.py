"""Write a ZeRO-1 checkpoint of many ranks in real size, with holes in the files for the tensors.

write_sparse_ranks.py OUT RANKS PARAMETERS ELEMENTS     OUT/global_step7: of PARAMETERS tensors of ELEMENTS each
"""

import math
import struct
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch
from deepspeed.utils.tensor_fragment import fragment_address

from write_parallel_checkpoint import KEYS, TAG, Case, model_states


def main() -> None:
    out, (ranks, parameters, elements) = Path(sys.argv[1]), map(int, sys.argv[2:])
    names = [f"layers.{number}.weight" for number in range(parameters)]
    case = Case([{name: [(elements,)] for name in names}], {"universal_checkpoint_version": 0.2}, dp=ranks)
    folder = out / TAG
    folder.mkdir(parents=True)
    partition = math.ceil(parameters * elements / (2 * ranks)) * 2
    padding = partition * ranks - parameters * elements
    master, *moments = (torch.empty(partition) for _ in range(3))
    with torch.serialization.skip_data():
        for rank in range(ranks):
            optimizer = {
                "base_optimizer_state": {
                    "state": {0: {"step": 7, **dict(zip(KEYS[1:], moments, strict=True))}},
                    "param_groups": [{"lr": 1e-4, "params": [0]}],
                },
                "single_partition_of_fp32_groups": [master],
                "zero_stage": 1,
                "group_paddings": [padding if rank == ranks - 1 else 0],
                "partition_count": [ranks],
                "param_slice_mappings": [fragments(rank * partition, partition, parameters, elements)],
            }
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": {**optimizer, "ds_version": "0.16.2"}}, folder / name)
            give_checksums(folder / name, 3 * rank)
        weight = {"fp32": torch.empty(elements, dtype=torch.bfloat16)}  # the same for all: nothing is converted
        torch.save(model_states(case, [dict.fromkeys(names, weight)]), folder / "mp_rank_00_model_states.pt")


def give_checksums(path: Path, first: int) -> None:
    """Give each record its own checksum: records in holes have none, and all ranks' files would look like copies."""
    with open(path, "r+b") as file, zipfile.ZipFile(path) as archive:
        records = [info for info in archive.infolist() if "/data/" in info.filename]
        file.seek(archive.start_dir)
        directory = file.read()
        for number, info in enumerate(records):
            at = directory.index(info.filename.encode()) - 46  # an entry's fixed part, with the checksum at 16
            file.seek(archive.start_dir + at + 16)
            file.write(struct.pack("<L", 1 + first + number))


def fragments(first: int, partition: int, parameters: int, elements: int) -> "OrderedDict[str, fragment_address]":
    """Each parameter's fragment in the partition that starts at element `first` of the flattened group."""
    found = OrderedDict()
    for number in range(first // elements, parameters):
        low, high = max(number * elements, first), min((number + 1) * elements, first + partition)
        if low >= high:
            break
        found[f"layers.{number}.weight"] = fragment_address(numel=high - low, start=low - first)
    return found


if __name__ == "__main__":
    main()
