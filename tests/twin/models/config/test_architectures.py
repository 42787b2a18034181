"""Readers by the names of architectures: the same one by one as all together, and none loaded that is not asked for."""

import json
import subprocess
import sys

from tests.twin.models.config.sums import row
from twin.models.config.architectures import FAMILIES, reader_of, readers

LOADED = """
import json, sys
from twin.models.config import read_config
read_config(json.loads(sys.argv[1]), "config.json", name="toy")
print(*sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("twin.models.config.")))
"""


def test_a_reader_is_found_by_each_of_the_names_that_are_known() -> None:
    assert all(reader_of(name) is reader for name, reader in readers().items())
    assert reader_of("LamaForCausalLM") is None


def test_a_model_loads_its_own_family_and_no_quantisation_that_it_has_not() -> None:
    command = [sys.executable, "-c", LOADED, json.dumps(row("LlamaForCausalLM"))]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert loaded & set(FAMILIES) == {"dense"}
    assert not loaded & {"methods", "modules", "schemes"}
