"""Compare DeepSpeed's `_strip_tensor_paddings` with "drop the padding, at most everything"; print counts as JSON."""

import json

import torch
from deepspeed.checkpoint.zero_checkpoint import ZeROCheckpoint
from hypothesis import example, given, settings
from hypothesis import strategies as st

checked = {"within": 0, "beyond": 0}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 120)), min_size=1, max_size=3))
@example([(2, 5)])
@example([(10, 0), (348, 1024)])
@example([(348, 348), (348, 347)])
def stripping_drops_the_padding(groups: list[tuple[int, int]]) -> None:
    moments = [torch.arange(1.0, partition + 1) for partition, _ in groups]
    state = {i: {"step": torch.tensor(7.0), "exp_avg": m.clone(), "exp_avg_sq": -m} for i, m in enumerate(moments)}
    paddings = [padding for _, padding in groups]
    checkpoint = {"optimizer_state_dict": {"base_optimizer_state": {"state": state}, "group_paddings": paddings}}

    ZeROCheckpoint.__new__(ZeROCheckpoint)._strip_tensor_paddings(checkpoint)

    for i, (moment, (partition, padding)) in enumerate(zip(moments, groups, strict=True)):
        left = moment[: partition - padding] if padding <= partition else moment[:0]
        assert torch.equal(state[i]["exp_avg"], left)
        assert torch.equal(state[i]["exp_avg_sq"], -left)
        assert state[i]["step"] == 7.0
        checked["within" if padding <= partition else "beyond"] += 1


if __name__ == "__main__":
    stripping_drops_the_padding()
    print(json.dumps(checked))
