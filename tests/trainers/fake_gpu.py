"""fake_gpu: run code written for CUDA + NCCL on a CPU-only torch build.

A tensor is "on cuda" if its *storage* has the Python attribute ``_fg`` set. The data is always in CPU memory.
Two modes emulate the device:
  FG  (TorchFunctionMode): maps device=... arguments, .cuda(), .cpu() and .to(); overrides .is_cuda, .device,
      .type(), .get_device(), .is_pinned(). Transfers between host and device always copy.
  FGD (TorchDispatchMode): a new output storage is "cuda" if any tensor input is "cuda".
Also: stubs for torch.cuda.*, gloo instead of nccl, ReduceOp.AVG. Threads inherit the modes.
Environment: FAKEGPU_NDEV (default: WORLD_SIZE or 8), FAKEGPU_PG_TIMEOUT (seconds, default 120)
"""

import contextlib
import datetime
import functools
import inspect
import os
import threading
import types

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
T = torch.Tensor


def _rank():
    return int(os.environ.get("LOCAL_RANK", "0"))


_cur = [None]


def _curdev():
    return _rank() if _cur[0] is None else _cur[0]


def _stor(t):
    try:
        with torch._C.DisableTorchFunction():
            return t.untyped_storage()
    except Exception:
        return None


def is_gpu(t):
    s = _stor(t)
    return s is not None and getattr(s, "_fg", False)


def tag(t, on=True):
    s = _stor(t)
    if s is not None:
        with contextlib.suppress(Exception):
            s._fg = bool(on)
    return t


def _realcpu(t):
    with torch._C.DisableTorchFunction():
        return t.device.type == "cpu"


def _tensors(x, acc):
    if isinstance(x, T):
        acc.append(x)
    elif isinstance(x, (list, tuple)):
        for y in x:
            _tensors(y, acc)
    elif isinstance(x, dict):
        for y in x.values():
            _tensors(y, acc)
    return acc


class FGD(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        ins = _tensors((args, kwargs), [])
        gpu = [s for s in map(_stor, ins) if s is not None and getattr(s, "_fg", False)]
        if gpu:
            known = {s._cdata for s in map(_stor, ins) if s is not None}
            for t in _tensors(out, []):
                s = _stor(t)
                if s is not None and s._cdata not in known and not hasattr(s, "_fg"):
                    with contextlib.suppress(Exception):
                        s._fg = True
        return out


def _norm(d):
    """The device type: 'cuda', 'cpu', or None (unchanged)."""
    if d is None or isinstance(d, bool):
        return None
    if isinstance(d, int):
        return "cuda"
    if isinstance(d, torch.device):
        return d.type if d.type in ("cuda", "cpu") else None
    if isinstance(d, str):
        b = d.split(":")[0]
        return b if b in ("cuda", "cpu") else None
    return None


_DEVD, _ISCD, _ISCPUD = T.device, T.is_cuda, T.is_cpu


def _land(out, src, where):
    """Set the device of `out` to `where`; copy if the device differs and `out` shares memory with `src`."""
    if where is None or not isinstance(out, T):
        return out
    if not _realcpu(out):
        return out
    g = is_gpu(out)
    if (where == "cuda") != bool(g):
        if (
            src is not None
            and _stor(src) is not None
            and _stor(out) is not None
            and _stor(out)._cdata == _stor(src)._cdata
        ):
            out = out.clone()
        tag(out, where == "cuda")
    return out


class FG(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs) if kwargs else {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            d = getattr(func, "__self__", None)
            if d is _DEVD:
                r = func(*args)
                return torch.device("cuda", _curdev()) if r.type == "cpu" and is_gpu(args[0]) else r
            if d is _ISCD:
                return bool(is_gpu(args[0]))
            if d is _ISCPUD:
                return bool(func(*args)) and not is_gpu(args[0])
            return func(*args, **kwargs)
        if name == "__set__":
            return func(*args, **kwargs)
        if func is T.get_device:
            return _curdev() if is_gpu(args[0]) else func(*args)
        if func is T.is_pinned:
            return bool(getattr(_stor(args[0]), "_pin", False))
        if func is T.pin_memory:
            if getattr(_stor(args[0]), "_pin", False):
                return args[0]
            o = args[0].detach().clone() if not args[0].requires_grad else args[0].clone()
            tag(o, False)
            _stor(o)._pin = True
            return o
        if func is T.record_stream:
            return None
        if func is T.share_memory_ and is_gpu(args[0]):
            return args[0]
        if func is T.cuda or func is T.cpu:
            return _land(args[0], args[0], name)
        if func is T.type and not kwargs and len(args) == 1:
            r = func(*args)
            return r.replace("torch.", "torch.cuda.") if is_gpu(args[0]) else r
        if func is T.type and (len(args) > 1 or "dtype" in kwargs):
            ty = args[1] if len(args) > 1 else kwargs["dtype"]
            s = ty if isinstance(ty, str) else getattr(ty, "_fgname", None)
            if s and s.startswith("torch.cuda."):
                return _land(func(args[0], s.replace("torch.cuda.", "torch.")), args[0], "cuda")
        where = None
        src = None
        args = list(args)
        if func is T.to:
            src = args[0]
            if len(args) > 1:
                a = args[1]
                if isinstance(a, T):
                    where = "cuda" if is_gpu(a) else ("cpu" if _realcpu(a) else None)
                else:
                    w = _norm(a)
                    if w:
                        where = w
                        args[1] = "cpu"
            if "other" in kwargs:
                where = "cuda" if is_gpu(kwargs["other"]) else "cpu"
        if "device" in kwargs:
            w = _norm(kwargs["device"])
            if w:
                where = w
                kwargs["device"] = "cpu"
        pin = kwargs.pop("pin_memory", False) if "pin_memory" in kwargs else False
        if func is T.__deepcopy__:
            g = is_gpu(args[0])
            out = func(*args, **kwargs)
            return tag(out, True) if g else out
        out = func(*args, **kwargs)
        if where is not None and isinstance(out, T):
            out = _land(out, src, where)
        if pin and isinstance(out, T):
            s = _stor(out)
            if s is not None:
                s._pin = True
        return out


class Stream:
    def __init__(self, *a, **k):
        self.cuda_stream = 0
        self.stream_id = 0
        self.device_index = 0
        self.device = torch.device("cuda", _curdev())

    def wait_stream(self, *a):
        pass

    def record_event(self, e=None):
        return e if e is not None else Event()

    def synchronize(self):
        pass

    def wait_event(self, *a):
        pass

    def query(self):
        return True

    def is_capturing(self):
        return False

    def __enter__(self):
        return self

    def __exit__(self, *a):
        return False


class Event:
    def __init__(self, *a, **k):
        pass

    def synchronize(self):
        pass

    def wait(self, *a):
        pass

    def record(self, *a):
        pass

    def query(self):
        return True

    def elapsed_time(self, o):
        return 0.001


def _typed(name, dtype):
    class Meta(type):
        def __instancecheck__(cls, o):
            return isinstance(o, T) and o.dtype == dtype and bool(is_gpu(o))

    def new(cls, *a, **k):
        k.pop("device", None)
        if a and isinstance(a[0], int):
            o = torch.empty(*a, dtype=dtype)
        elif not a:
            o = torch.empty(0, dtype=dtype)
        else:
            o = torch.tensor(a[0], dtype=dtype)
        return tag(o)

    return Meta(name, (), {"__new__": new, "_fgname": f"torch.cuda.{name}", "dtype": dtype})


def _ctx(*a, **k):
    return contextlib.nullcontext()


def _patch_cuda():
    c = torch.cuda
    default = Stream()
    default.device = torch.device("cuda", 0)
    c.is_available = lambda: True
    c.is_initialized = lambda: True
    c.init = lambda: None
    c._lazy_init = lambda: None
    c.device_count = lambda: int(os.environ.get("FAKEGPU_NDEV") or os.environ.get("WORLD_SIZE") or 8)
    c.current_device = _curdev
    c._get_device_index = lambda *a, **k: _curdev()

    def set_device(d):
        if isinstance(d, torch.device):
            d = d.index or 0
        _cur[0] = int(str(d).split(":")[-1]) if not isinstance(d, int) else d

    c.set_device = set_device
    c.synchronize = lambda *a, **k: None
    c.current_stream = lambda *a, **k: default
    c.default_stream = lambda *a, **k: default
    c.set_stream = lambda *a, **k: None
    c.Stream = Stream
    c.Event = Event
    if bases := getattr(torch, "_streambase", None):  # torch._dynamo of torch 2.4 asks for these, which are ABCs there
        for base, ours in ((bases._StreamBase, Stream), (bases._EventBase, Event)):
            getattr(base, "register", lambda ours: None)(ours)
    c.ExternalStream = Stream
    c.stream = lambda s: contextlib.nullcontext()
    c.device = lambda *a, **k: contextlib.nullcontext()
    c.empty_cache = lambda: None
    c.is_current_stream_capturing = lambda: False
    if accelerator := getattr(torch, "accelerator", None):  # torch's optimizers ask it since 2.15
        accelerator.current_stream = c.current_stream
        accelerator.current_device_index = _curdev
    for n in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "utilization",
        "temperature",
        "power_draw",
        "clock_rate",
        "device_memory_used",
    ):
        setattr(c, n, lambda *a, **k: 0)
    c.reset_peak_memory_stats = lambda *a, **k: None
    import collections

    c.memory_stats = lambda *a, **k: collections.defaultdict(int)
    c.mem_get_info = lambda *a, **k: (80 << 30, 80 << 30)
    c.get_device_capability = lambda *a, **k: (9, 0)
    c.get_device_name = lambda *a, **k: "fake_gpu"
    c.get_device_properties = lambda *a, **k: types.SimpleNamespace(
        name="fake_gpu", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, uuid="0"
    )
    c.is_bf16_supported = lambda *a, **k: True
    c.get_rng_state = lambda *a, **k: torch.random.get_rng_state()
    c.set_rng_state = lambda s, *a, **k: torch.random.set_rng_state(s.cpu() if isinstance(s, T) else s)
    c.manual_seed = lambda s: torch.default_generator.manual_seed(int(s)) and None
    c.manual_seed_all = lambda s: torch.default_generator.manual_seed(int(s)) and None
    c.random.get_rng_state = c.get_rng_state
    c.random.set_rng_state = c.set_rng_state
    c.random.manual_seed = c.manual_seed
    c.default_generators = tuple([torch.default_generator] * 16)
    c._is_in_bad_fork = lambda: False
    c.cudart = lambda: types.SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
    c.check_error = lambda *a: None
    c.nvtx.range_push = lambda *a, **k: 0
    c.nvtx.range_pop = lambda *a, **k: 0
    c.nvtx.range = _ctx
    for n, dt in {
        "FloatTensor": torch.float32,
        "HalfTensor": torch.float16,
        "BFloat16Tensor": torch.bfloat16,
        "LongTensor": torch.int64,
    }.items():
        setattr(c, n, _typed(n, dt))
    torch.compile = lambda m=None, *a, **k: m if m is not None else (lambda f: f)
    # torch.load(map_location=cuda)
    oload = torch.load

    @functools.wraps(oload)
    def load(*a, **k):
        ml = k.get("map_location")
        w = _norm(ml) if not callable(ml) else None
        if w == "cuda":
            k["map_location"] = "cpu"
        r = oload(*a, **k)
        if w == "cuda":
            for t in _tensors(r, []):
                tag(t)
        return r

    torch.load = load


def _changed(function, change):
    """The function, called with its arguments by name as `change` leaves them."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **keywords):
        bound = signature.bind(*args, **keywords)
        change(bound.arguments)
        return function(**bound.arguments)

    return call


def _patch_dist():
    import torch.distributed as d
    import torch.distributed.distributed_c10d as c10

    timeout = datetime.timedelta(seconds=int(os.environ.get("FAKEGPU_PG_TIMEOUT", "120")))

    def with_gloo(given):
        given.pop("device_id", None)
        given["timeout"] = timeout
        given["pg_options"] = None
        given["backend"] = "gloo" if given.get("backend") else None

    def begin_with_gloo(given):
        with_gloo(given)
        given["backend"] = "gloo"

    def average(given):
        if given.get("op") == d.ReduceOp.AVG:
            given["op"] = d.ReduceOp.SUM
            ranks = d.get_world_size(given.get("group"))
            if "tensor" in given:
                given["tensor"].div_(ranks)
            else:
                given["input"] = given["input"] / ranks

    def without_devices(given):
        given.pop("device_ids", None)

    changes = {
        "init_process_group": begin_with_gloo,
        "new_group": with_gloo,
        "new_subgroups_by_enumeration": with_gloo,
        "all_reduce": average,
        "reduce_scatter_tensor": average,
        "_reduce_scatter_base": average,
        "barrier": without_devices,
    }
    for name, change in changes.items():
        changed = _changed(getattr(c10, name), change)
        setattr(c10, name, changed)
        if hasattr(d, name):
            setattr(d, name, changed)
    c10.ProcessGroupNCCL = getattr(c10, "ProcessGroupNCCL", None) or type(
        "ProcessGroupNCCL", (), {"Options": lambda *a, **k: types.SimpleNamespace(config=types.SimpleNamespace())}
    )
    d.ProcessGroupNCCL = c10.ProcessGroupNCCL
    d.is_nccl_available = lambda: True


def _patch_threads():
    o = threading.Thread._bootstrap_inner

    def boot(self):
        if getattr(self, "_fg_on", True):
            with FG(), FGD():
                return o(self)
        return o(self)

    threading.Thread._bootstrap_inner = boot


_on = []


def install():
    if _on:
        return
    _patch_cuda()
    _patch_dist()
    _patch_threads()
    a, b = FG(), FGD()
    a.__enter__()
    b.__enter__()
    _on.extend([a, b])
