"""An inference engine's own rules; file name = name on the command line."""

from importlib import import_module
from pathlib import Path

from twin.engines.rules import EngineRules
from twin.errors import find

__all__ = ["OWN", "EngineRules", "backend_names", "engine_names", "load_engine"]

OWN = "twin"  # the engine that runs this project's own kernels

_NOT_ENGINES = {"__init__", "rules"}


def engine_names() -> list[str]:
    """Names of the engines whose rules are known."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _NOT_ENGINES)


def load_engine(name: str) -> EngineRules:
    """The rulebook of engine `name`, or of a release of it such as `vllm==0.26`; UnknownName otherwise."""
    name, asks_version, version = name.partition("==")
    rules: EngineRules = import_module(f"twin.engines.{find('engine', name, engine_names())}").RULES
    return rules.at(version) if asks_version else rules


def backend_names() -> list[str]:
    """Names of all attention backends of all engines."""
    return sorted({name for engine in engine_names() for name in load_engine(engine).all_backends()})
