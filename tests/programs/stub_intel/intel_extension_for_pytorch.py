"""What DeepSpeed up to 0.14.0 imports before it agrees to run on a CPU; it uses nothing of it there.

Those releases also import two names for elastic training that torch has dropped since, and for autotuning one that
NumPy has dropped; no test trains elastically, or tunes.
"""

import logging

import numpy
import torch.distributed.elastic.agent.server.api as api
from torch.distributed.elastic.utils.distributed import get_socket_with_port

api.log = logging.getLogger(api.__name__)  # type: ignore[attr-defined]
api._get_socket_with_port = get_socket_with_port  # type: ignore[attr-defined]
if not hasattr(numpy, "BUFSIZE"):
    numpy.BUFSIZE = 8192  # type: ignore[attr-defined]
