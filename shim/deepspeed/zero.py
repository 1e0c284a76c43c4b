"""`deepspeed.zero`: a model is made whole, and sharded by `initialize`."""

from contextlib import nullcontext as _nullcontext

from phalanx.training.hf_deepspeed import GatheredParameters

__all__ = ["GatheredParameters", "Init"]


def Init(*args: object, **kwargs: object) -> _nullcontext[None]:
    """Nothing happens within it: parameters are whole until `initialize` shards them."""
    return _nullcontext()
