"""Makes `from ulak import ...` find the modules that the extension carries, whatever lies on the server's path.

The build makes this file the body of ulak_private.load_python(), which runs it once per session and build. Every
session that needs Python pays for what is imported here: importlib.abc alone would take longer than drawing a report.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class ExtensionModules:
    """Finder and loader in one, by their shape."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.sources:
            return None
        # A package without a path of its own: what the extension doesn't carry is found nowhere.
        is_package = name == "ulak" or any(other.startswith(name + ".") for other in self.sources)
        origin = "plpython/" + name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
        return ModuleSpec(name, self, origin=origin, is_package=is_package)  # type: ignore[arg-type]

    def get_source(self, name: str) -> str:
        return self.sources[name]

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec and spec.origin
        source = self.sources[spec.name]
        # Tracebacks ask get_source() for the text, and would go on quoting an earlier build.
        if linecache := sys.modules.get("linecache"):
            linecache.cache.pop(spec.origin, None)
        module.__file__ = spec.origin
        exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)


def install(sources: dict[str, str]) -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ExtensionModules"]
    sys.meta_path.insert(0, ExtensionModules(sources))
    for name in [name for name in sys.modules if name.split(".")[0] == "ulak"]:
        del sys.modules[name]
