"""What each codec is in decode attention: the loop that reads it, its compile-time functions and its plan.

Of the package's importers only those that run kernels import this: it needs triton.
"""

from realkernels.codecs.decode import groups, kvarn, per_token_head, plain, turboquant
from realkernels.codecs.decode.form import DecodeForm

FORMS: dict[str, DecodeForm] = {
    **plain.FORMS, **per_token_head.FORMS, **groups.FORMS, **kvarn.FORMS, **turboquant.FORMS,
}  # fmt: skip
"""By the codec's name."""

__all__ = ["FORMS", "DecodeForm"]
