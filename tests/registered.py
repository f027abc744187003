"""What the fixes' folders hold, as dicts."""

from ckpt_patches.engine.fix import every_fix, fixes_of
from ckpt_patches.engine.registry import PACKAGES

FIXES = {name: fix.modules for name, fix in every_fix().items()}
# By switch, the edits that are not fixes, and what they edit.
SWITCHED: dict[str, dict[str, tuple[str, ...]]] = {}
for _package in PACKAGES:
    for _name, _fix in fixes_of(_package).items():
        if _fix.switch:
            SWITCHED.setdefault(_fix.switch, {})[_name] = _fix.modules
EVERYTHING = {**FIXES, **{name: modules for parts in SWITCHED.values() for name, modules in parts.items()}}
# The package of each module that one edits.
TARGETS = {module: fix.package for package in PACKAGES for fix in fixes_of(package).values() for module in fix.modules}
