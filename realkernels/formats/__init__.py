"""In how many bits K and V really lie: one file a format allocates planes, quantises into them and reads them back."""

from realkernels.formats.format import Format, RowFormat
from realkernels.formats.kvarn import KVarN
from realkernels.formats.planes import Arrangement, Planes
from realkernels.formats.registry import arrangements, format_named, format_names

__all__ = ["Arrangement", "Format", "KVarN", "Planes", "RowFormat", "arrangements", "format_named", "format_names"]
