"""Limits that several kinds of observation share. Imports no torch."""

from mezzo.formats import FP32, FP64, TF32

MOST_LISTED = 12
"""Most modules or lines that a finding lists."""
HEADROOM = 2
"""Doublings between a suggested loss scale and the largest one that fits: gradients vary by about that much between batches."""
ROUNDOFFS = 40
"""Tolerated error of a gradient, in unit roundoffs: a hundred healthy layers in a row stay below it."""
LOST_BELOW = 0.1
"""Relative error from which a gradient is wrong because values became too small."""
SHARE_BELOW = 0.25
"""Share of all gradient elements that must be wrong: a key's bias or a word that never occurs has a gradient of next to nothing."""
FADED = 2.0**-10
"""Share of the largest gradient so far below which a gradient is what is left of a training that is over."""
WEIGHTY = 0.1
"""Share of a result's norm from which what vanished in it is to blame: what vanished elsewhere is rounding."""
HARMLESS_LISTED = 3
"""Harmless values that a diagnosis names."""
TENSOR_CORE_MULTIPLE = 8
"""Elements of 16 bits that a Tensor Core's kernels load at once: 16 bytes."""
IMAGE_CHANNELS = 4
"""Most channels of a convolution that are an image's: cuDNN has kernels for so few, and pads them itself."""
WIDE = (FP32.name, TF32.name, FP64.name)
"""Formats in which a product does not run in mixed precision."""
FITTING = 0.9
"""Share of modules whose gradients the loss scale of single runs fits, so that an outlier still shows as one."""
