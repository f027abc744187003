"""save a bucket where a rank has only padding

The bucket of the last 33 elements is padded, and the second rank owns only padding.
"""

from functools import partial
from typing import Any

import torch

from trainers import megatron_training as mt


def network(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    """The first parameter has its own bucket: buffers are filled starting with the last parameter."""
    tiny = mt.tiny_model(config, dtype, native_fp32, hidden=64, out=8)
    linear, forward = (tiny.a, tiny.b), tiny.forward
    del tiny.a, tiny.b
    tiny.first = torch.nn.Parameter(torch.randn(33, dtype=dtype))
    tiny.a, tiny.b = linear
    tiny.forward = lambda x: forward(x) + tiny.first.pow(2).sum() * 0.01
    return tiny


if __name__ == "__main__":
    several_buckets = partial(mt.build, make_model=network, bucket_size=1000)
    mt.show_resume("dp_reshardable", several_buckets, steps=3, raises="AssertionError: empty bucket")
