"""Public names of a package that are imported when they are first asked for.

torch takes two seconds to import, and `semidice --help` must not wait for it.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: Sequence[str], public: Sequence[str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose public names are those of its modules.

    public: the names; None takes `__all__` of every module.
    """

    def attribute(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = [import_module(f"{package}.{module}") for module in modules]
        names = {
            each: getattr(module, each)
            for module in found
            for each in (module.__all__ if public is None else public)
            if hasattr(module, each)
        }
        vars(sys.modules[package]).update(names, __all__=sorted(names))
        try:
            return vars(sys.modules[package])[name]
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *attribute("__all__")})

    return attribute, names
