"""A plugin of pytest: what the main branch of Megatron-LM imports from Python 3.12, on an older one."""

import typing

import typing_extensions

if not hasattr(typing, "override"):
    vars(typing)["override"] = typing_extensions.override
