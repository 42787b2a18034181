"""What docs/models.md lists is what is shipped and read. `python -m tests.twin.models.test_documented` writes it."""

from importlib import import_module
from pathlib import Path

from twin.models.config.architectures import FAMILIES, readers
from twin.models.config.methods import METHODS
from twin.models.config.schemes import SCHEMES
from twin.models.rewritten import weight_names
from twin.models.store import model_summaries

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- lists: written by python -m tests.twin.models.test_documented -->\n", "<!-- /lists -->"
ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model")


def short(name: str) -> str:
    """A class without the ending that all have."""
    return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)


def lists() -> str:
    """Shipped models, classes by the module that reads them, methods of quantisation, and names of weights."""
    rows = [f"| `{name}` | {line} |" for name, line in model_summaries().items()]
    text = "\n".join(["\n## Shipped\n", "| model | what it is |", "|---|---|", *rows]) + "\n\n## Architectures\n\n"
    text += "By the module of `twin/models/config/` that reads them, without `ForCausalLM` and the like.\n\n"
    for family in FAMILIES:
        named = import_module(f"twin.models.config.{family}").READERS
        classes = sorted({short(name) for name in named if name[0].isupper()}, key=lambda name: (name.casefold(), name))
        text += f"- **{family}**: {', '.join(classes)}\n"
    text += f"\n## Quantisation\n\nMethods: {', '.join(sorted({*METHODS, *SCHEMES}))}.\n\n"
    return text + f"`--weights`: {', '.join(weight_names())}, and `N.NNbpw`.\n\n"


def written() -> str:
    """The document as it should be."""
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + lists() + END + rest.partition(END)[2]


def test_the_document_lists_what_is_shipped_and_read() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == written()


def test_every_class_that_is_read_is_in_a_listed_family() -> None:
    named = {name for family in FAMILIES for name in import_module(f"twin.models.config.{family}").READERS}
    assert named == readers().keys()


if __name__ == "__main__":
    DOCUMENT.write_text(written(), encoding="utf-8")
