"""An inference engine's own rules; its name on the command line is that of its file, or one of `_MODULES`."""

from importlib import import_module
from pathlib import Path

from hwprofiles.spelling import match
from twin.engines.rules import EngineRules
from twin.errors import find

__all__ = ["OWN", "EngineRules", "backend_names", "engine_names", "load_engine"]

OWN = "twin"  # the engine that runs this project's own kernels

_NOT_ENGINES = {"__init__", "rules"}
_MODULES = {"llama_cpp": "llama.cpp"}
"""Files whose engine has a name that no module can have."""
_ALSO_KNOWN = {"llama-server": ("llama_cpp", "RULES"), "ollama": ("llama_cpp", "OLLAMA")}
"""Programs around an engine: the file of its rules, and those that it runs under."""


def engine_names() -> list[str]:
    """Names of the engines whose rules are known."""
    stems = (path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _NOT_ENGINES)
    return sorted(_MODULES.get(stem, stem) for stem in stems)


def load_engine(name: str) -> EngineRules:
    """The rulebook of engine `name`, or of a release of it such as `vllm==0.26`; UnknownName otherwise."""
    name, asks_version, version = name.partition("==")
    also = match(name, _ALSO_KNOWN)
    if also is not None:
        module, which = _ALSO_KNOWN[also]
    else:
        found, which = find("engine", name, engine_names()), "RULES"
        module = next((stem for stem, called in _MODULES.items() if called == found), found)
    rules: EngineRules = getattr(import_module(f"twin.engines.{module}"), which)
    return rules.at(version) if asks_version else rules


def backend_names() -> list[str]:
    """Names of all attention backends of all engines."""
    return sorted({name for engine in engine_names() for name in load_engine(engine).all_backends()})
