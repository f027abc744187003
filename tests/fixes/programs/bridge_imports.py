"""Importing this module imports Megatron-Bridge's checkpoint code, with stubs for packages that are not installed."""

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from trainers import megatron_training  # noqa: F401  installs the GPU stub first

# Bridge imports these at its top; the code under test uses none of them.
NOT_HERE = {
    "datasets": "the data of supervised finetuning",
    "modelopt": "quantisation, needs a GPU",
    "omegaconf": "overrides on the command line",
    "regex": "a tokenizer's splitting of text",
    "six": "a tokenizer's conversion of text",
    "torch.utils.tensorboard": "a log, and the package that writes it",
    "transformers": "tokenizers and the conversion from Hugging Face",
    "yaml": "run_config.yaml, written as JSON here, which YAML contains",
}


class StandIns:
    """A finder of the modules of NOT_HERE and all their submodules. Any name in them is an empty class."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        stands_in = any(f"{name}.".startswith(f"{absent}.") for absent in NOT_HERE)
        return ModuleSpec(name, self, is_package=True) if stands_in else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = empty_class  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def import_bridge() -> None:
    """Import the checkpoint code and its dependencies, without the hundred models that Bridge's packages import."""
    sys.meta_path.insert(0, StandIns())
    for name in ("megatron.bridge", "megatron.bridge.models"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = list(spec.submodule_search_locations or [])
    # Bridge uses these names in the types of its configuration; Mamba needs Triton.
    mamba: Any = types.ModuleType("megatron.bridge.models.mamba.mamba_provider")
    mamba.MambaModelProvider = empty_class("MambaModelProvider")
    sys.modules.update({"megatron.bridge.models.mamba": mamba, mamba.__name__: mamba})
    models: Any = sys.modules["megatron.bridge.models"]
    models.T5ModelProvider = empty_class("T5ModelProvider")
    models.GPTModelProvider = importlib.import_module("megatron.bridge.models.gpt_provider").GPTModelProvider
    checkpointing = importlib.import_module("megatron.bridge.training.checkpointing")
    for name in ("restore_modelopt_state", "save_modelopt_state", "save_sharded_modelopt_state"):
        setattr(checkpointing, name, lambda *args: None)
    stub_yaml()


def stub_yaml() -> None:
    """Replace YAML by JSON, which is a subset of it."""
    yaml: Any = sys.modules["yaml"]
    yaml.safe_dump = lambda data, file, **kwargs: json.dump(data, file, default=str)
    yaml.safe_load = json.load
    yaml.SafeDumper = types.SimpleNamespace(
        yaml_representers={},
        yaml_multi_representers={},
        add_representer=lambda *args: None,
        add_multi_representer=lambda *args: None,
    )


import_bridge()
