"""The loaders that the finder puts in: here a module's tree is planned, outside of the lock of the import system."""

import sys
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType, TracebackType
    from typing import Any

    from ckpt_patches.engine.plan import FilePlan
    from ckpt_patches.startup import Switches


class PatchedLoader(SourceFileLoader):
    """Loads one upstream module from its edited source; upstream's bytecode is neither read nor written.

    A `.pyc` beside the upstream file may be stale (unchecked hash); one with edited code would outlive an uninstall.
    A module without an edit goes back to its ordinary loader.
    """

    def __init__(self, ordinary: SourceFileLoader, switches: "Switches") -> None:
        super().__init__(ordinary.name, ordinary.path)
        self.ordinary = ordinary
        self.switches = switches
        self.file: FilePlan | None = None  # once its code was handed out

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Hand a module without an edit back: it then fails, and caches its bytecode, as it would without us."""
        from ckpt_patches.hook import report, running

        if spec.loader is self:
            plan = running.plan_for(self.name, self.path, self.switches)
            if plan is None or self.name not in plan.files:
                spec.loader = self.ordinary
                running.keep_unedited(self.name, spec)
                if plan is not None:
                    report.tell(plan, self.switches)
        return None

    def get_code(self, fullname: str) -> "CodeType | None":
        """The edited code, or upstream's where another hook loads the module by this loader, in its own way.

        Raises:
            StrictModeError: in strict mode, if a fix of this module's tree does not match.
        """
        from ckpt_patches.hook import report, running

        module = sys.modules.get(fullname)  # none for `python -m`
        spec = getattr(module, "__spec__", None)
        if spec is not None and not isinstance(spec.loader, PatchedLoader):
            return super().get_code(fullname)
        plan = running.plan_for(self.name, self.path, self.switches)
        if plan is not None:
            report.tell(plan, self.switches)
        self.file = plan.files.get(self.name) if plan is not None else None
        if self.file is not None:
            self._show_edited_lines()
            return self.file.code
        if module is not None and spec is not None and spec.loader is self:  # a reload
            spec.loader = module.__loader__ = self.ordinary
            running.keep_unedited(self.name, spec)
        return super().get_code(fullname)

    def get_data(self, path: "Any") -> bytes:
        return self.file.patched if self.file is not None and path == self.path else super().get_data(path)

    def _show_edited_lines(self) -> None:
        """What tracebacks, pdb and inspect.getsource show is what runs."""
        import linecache

        lines = (self.get_source(self.name) or "").splitlines(keepends=True)
        # Without a time of change it is not compared with the file.
        linecache.cache[self.path] = (sum(map(len, lines)), None, lines, self.path)
        # Up to Python 3.12 the interpreter itself prints what nobody caught, with the lines of the file on disk.
        if sys.version_info < (3, 13) and sys.excepthook is sys.__excepthook__:
            sys.excepthook = _print_exception


def _print_exception(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
    import traceback

    if sys.stderr is not None:
        traceback.print_exception(kind, error, trace)


class CheckedLoader:
    """Another's loader, behind a look at what runs. The module that it loads keeps nothing of this one."""

    def __init__(self, loader: "Any", switches: "Switches") -> None:
        self.loader = loader
        self.switches = switches

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        """Raises StrictModeError in strict mode, if a fix that is needed does not run."""
        from ckpt_patches.hook import running

        for holder, name in ((module.__spec__, "loader"), (module, "__loader__")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self.loader)
        running.examine(self.switches)
        self.loader.exec_module(module)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.loader, name)
