"""Makes `from ulak import ...` find the modules that the extension carries, whatever lies on the server's path.

The build makes this file the body of ulak._load_python(), which runs it once per session and build.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import types
from collections.abc import Sequence


class ExtensionModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "ulak":
            return None
        # Falling through would let a file on the server's path stand in for a module of ours.
        if name not in self.sources:
            raise ModuleNotFoundError(f"the extension carries no module {name}", name=name)
        is_package = any(other.startswith(name + ".") for other in self.sources) or name == "ulak"
        return importlib.util.spec_from_loader(
            name, self, origin=self.filename(name, is_package), is_package=is_package
        )

    def filename(self, name: str, is_package: bool) -> str:
        return "plpython/" + name.replace(".", "/") + ("/__init__.py" if is_package else ".py")

    def get_source(self, name: str) -> str:
        return self.sources[name]

    def exec_module(self, module: types.ModuleType) -> None:
        spec = module.__spec__
        assert spec and spec.origin
        source = self.sources[spec.name]
        # Without a modification time linecache never looks for the file, so tracebacks quote this text.
        linecache.cache[spec.origin] = (len(source), None, source.splitlines(keepends=True), spec.origin)
        module.__file__ = spec.origin
        exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)


def install(sources: dict[str, str]) -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ExtensionModules"]
    sys.meta_path.insert(0, ExtensionModules(sources))
    for name in [name for name in sys.modules if name.split(".")[0] == "ulak"]:
        del sys.modules[name]
