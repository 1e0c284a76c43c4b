"""OPT: learned positions from row 2 on, LayerNorms before or after, projections around layers of another width."""

from phalanx.models.opt.container import OPTLayer, OPTOuter
from phalanx.models.opt.model import OPTModel
from phalanx.models.opt.policy import OPTPolicy

__all__ = ["OPTLayer", "OPTModel", "OPTOuter", "OPTPolicy"]
