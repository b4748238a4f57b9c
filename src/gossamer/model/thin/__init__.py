"""Remove filters and channels that a model does not need; `thinning.py` has the algorithm."""

from gossamer.model.thin.cuts import Cuts
from gossamer.model.thin.thinning import Thinned, incoherent, plan, thin

__all__ = ["Cuts", "Thinned", "incoherent", "plan", "thin"]
