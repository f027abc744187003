"""The trainers, imported at first use: the process of pytest needs neither upstream's packages nor the GPU stub."""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["dcp_saving", "dt", "gpt_training", "megatron_lm", "mt", "nvrx_saving", "optimizers", "zarr_saving"]


class Lazy:
    """A module that is imported when one of its names is used."""

    def __init__(self, name: str) -> None:
        vars(self)["_name"] = f"trainers.{name}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks for `__test__`, `_mock_name` and others
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(self._name), name, value)


if TYPE_CHECKING:
    from trainers import dcp_saving, gpt_training, megatron_lm, nvrx_saving, optimizers, zarr_saving
    from trainers import deepspeed_training as dt
    from trainers import megatron_training as mt
else:
    dt, mt, dcp_saving = (Lazy(name) for name in ("deepspeed_training", "megatron_training", "dcp_saving"))
    gpt_training, megatron_lm = Lazy("gpt_training"), Lazy("megatron_lm")
    nvrx_saving, optimizers, zarr_saving = Lazy("nvrx_saving"), Lazy("optimizers"), Lazy("zarr_saving")
