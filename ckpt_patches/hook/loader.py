"""The loaders that the finder installs. They plan a module's tree, outside of the import lock."""

import sys
from _frozen_importlib_external import SourceFileLoader

from ckpt_patches.hook import in_place, running

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType
    from typing import Any

    from ckpt_patches import Switches
    from ckpt_patches.engine.plan import FilePlan


class PatchedLoader(running.RunsEditedCode):
    """Loads one upstream module from its edited source; upstream's bytecode is neither read nor written.

    A `.pyc` beside the upstream file may be stale (unchecked hash); one with edited code would outlive an uninstall.
    A module without an edit is handed back to its ordinary loader.
    """

    def __init__(self, ordinary: SourceFileLoader, switches: "Switches") -> None:
        super().__init__(ordinary.name, ordinary.path)
        self.ordinary = ordinary
        self.switches = switches
        self.file: FilePlan | None = None  # set when its code is used
        self.in_place: Mapping[str, Sequence[str]] = {}  # by function, the fixes already in its file

    def __reduce__(self) -> "tuple[Any, ...]":
        return SourceFileLoader, (self.name, self.path)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Hand a module without an edit back to its loader: errors and bytecode are then as without our hook."""
        if spec.loader is self and self._plan(log_edited=False) is None and not self._is_looked_at():
            self._hand_back(spec)
        return None

    def exec_module(self, module: "ModuleType") -> None:
        """Run the edited code in a module, also if another hook's loader calls this one.

        Raises:
            StrictModeError: in strict mode, if a fix of this module's tree is not active.
        """
        from ckpt_patches.hook import functions

        self.file = self._plan()
        spec = module.__spec__
        if self.file is None:  # a reload, edits in place, or an entry point of saves and loads
            if spec is not None and spec.loader is self:
                module.__loader__ = self.ordinary
                self._hand_back(spec)
            super().exec_module(module)
        else:
            running.record(module, self.file)
            exec(self._code(self.file), module.__dict__)
        functions.guard(module, self.name, self.switches)
        edited = self.file.functions if self.file is not None else {}
        if edited or self.in_place:
            functions.record(module, self.name, {**self.in_place, **edited})

    def get_code(self, fullname: str) -> "CodeType | None":
        """The edited code for `python -m`, which runs it as `__main__`; upstream's for a hook that runs it itself.

        Raises:
            StrictModeError: in strict mode, if a fix of this module's tree is not active.
        """
        if fullname in sys.modules and not running.is_ours(fullname):
            return super().get_code(fullname)
        file = self._plan()
        if file is None:
            return super().get_code(fullname)
        self.file = file
        return self._code(file)

    def get_data(self, path: "Any") -> bytes:
        return self.file.patched if self.file is not None and path == self.path else super().get_data(path)

    def _plan(self, *, log_edited: bool = True) -> "FilePlan | None":
        """This module's edits, if any. Logs the plan, for a module with edits only if `log_edited`."""
        plan = running.plan_for(self.name, self.path, self.switches)
        file = plan.files.get(self.name) if plan is not None else None
        self.in_place = in_place.functions(plan.root, plan.package, self.name) if plan is not None else {}
        if plan is not None and (file is None or log_edited):
            from ckpt_patches.hook import log_lines

            log_lines.tell(plan, self.switches)
        return file

    def _is_looked_at(self) -> bool:
        """Whether functions of the module are checked or guarded after it has run."""
        if self.in_place:
            return True
        if self.switches.mode != "strict":
            return False
        from ckpt_patches.hook.functions import ENTRANCES

        return self.name in ENTRANCES

    def _hand_back(self, spec: "ModuleSpec") -> None:
        spec.loader = self.ordinary
        running.keep_unedited(self.name, spec)
        self.file = None
        if "linecache" in sys.modules:
            sys.modules["linecache"].cache.pop(self.path, None)

    def _code(self, file: "FilePlan") -> "CodeType":
        """The code of the edited file under this module's path. Adds its lines to `linecache`, for tracebacks."""
        import linecache

        lines = (self.get_source(self.name) or "").splitlines(keepends=True)
        # Without an mtime, `linecache` does not compare it with the file.
        linecache.cache[self.path] = (len(file.patched), None, lines, self.path)
        if file.path == self.path:
            return file.code
        code: CodeType = compile(file.patched, self.path, "exec", dont_inherit=True)
        return code


class CheckedLoader(running.LooksFirst):
    """Wraps another loader: before a module is loaded, puts that loader back and checks the code that runs."""

    def __init__(self, loader: "Any", switches: "Switches", target: str = "") -> None:
        self.loader = loader
        self.switches = switches
        self.target = target  # the module's name, if a fix may edit it

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Check, then create the module. Raises StrictModeError in strict mode, if a needed fix does not run."""
        self._put_back(spec)
        self._look()
        if not hasattr(self.loader, "create_module"):
            raise ImportError("loaders that define exec_module() must also define create_module()")
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        """Check, then run: for a reload, and for hooks that call loaders themselves. Raises as `create_module`."""
        self._put_back(module.__spec__)
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self.loader
        self._look()
        self.loader.exec_module(module)

    def get_code(self, fullname: str) -> "CodeType | None":
        """Check, then return the code, for `python -m`. Raises as `create_module`."""
        self._look()
        code: CodeType | None = self.loader.get_code(fullname)
        return code

    def _put_back(self, spec: "Any") -> None:
        if getattr(spec, "loader", None) is self:
            spec.loader = self.loader

    def _look(self) -> None:
        from ckpt_patches.hook import log_lines

        if self.target:
            path = getattr(self.loader, "path", None) or getattr(self.loader, "filename", None) or "?"
            plan = running.plan_for(self.target, str(path), self.switches)
            if plan is not None:
                log_lines.tell(plan, self.switches)
        running.examine(self.switches)

    def __getattr__(self, name: str) -> "Any":
        if name == "loader":  # while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)
