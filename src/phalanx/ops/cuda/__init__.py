"""Back ends that other packages for CUDA offer. A module here registers its implementations when it is imported."""

from phalanx.ops.cuda import fa3 as fa3
