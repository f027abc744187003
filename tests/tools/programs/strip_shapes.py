"""Remove the shapes of flattened tensors from an index of torch_dist; print as JSON how many it had.

strip_shapes.py FILE
"""

import json
import pickle
import sys
from pathlib import Path

import megatron.core.dist_checkpointing  # noqa: F401  the index can name its classes

path = Path(sys.argv[1])
index = pickle.loads(path.read_bytes())
shapes = index.mcore_data
index.mcore_data = {}
path.write_bytes(pickle.dumps(index))
print(json.dumps(len(shapes)))
