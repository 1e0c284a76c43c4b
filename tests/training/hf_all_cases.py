"""All cases of `hf_cases`."""

from tests.training.hf_cases import every_case as cases

__all__ = ["cases"]
