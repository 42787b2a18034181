"""What a model is made of, and where its description is found."""

from twin.models.spec import ModelSpec
from twin.models.store import load_model, model_names

__all__ = ["ModelSpec", "load_model", "model_names"]
