"""Limits that several kinds of observation share. Imports no torch."""

from mezzo.formats import BF16, FP16, FP32, FP64, TF32

MOST_LISTED = 12
"""The largest number of modules or lines in a finding."""
HEADROOM = 2
"""Doublings between a suggested loss scale and the largest one that fits: gradients vary by about that much between batches."""
ROUNDOFFS = 40
"""Tolerated error of a gradient, in unit roundoffs: a hundred healthy layers in a row stay below it."""
LOST_BELOW = 0.1
"""Relative error from which a gradient is wrong because values became too small."""
SHARE_BELOW = 0.25
"""Share of all gradient elements that must be wrong: an attention key's bias, or a rare word, has almost no gradient anyway."""
FADED = 2.0**-10
"""Share of the largest gradient norm so far below which the training has converged, so that small gradients do not matter."""
WEIGHTY = 0.1
"""Share of a result's norm that must vanish for the operation to be to blame: less is rounding."""
LEAST_SCALE = 2.0**7
"""The loss scale below which so many small gradients are lost that the operation which forces it is at fault."""
SURELY_LOW = 2.0**6
"""A scale that settles below this is too low in a run of any length."""
STEPS_THAT_SETTLE = 200
"""Steps of a run from which on a scale between ``SURELY_LOW`` and ``LEAST_SCALE`` is known to have settled there."""
HARMLESS_LISTED = 3
"""The largest number of harmless values in a diagnosis."""
TENSOR_CORE_MULTIPLE = 8
"""16-bit elements that a Tensor Core kernel loads at once: 16 bytes."""
IMAGE_CHANNELS = 4
"""Number of input channels up to which they count as an image's: cuDNN has kernels for so few, and pads them itself."""
NARROW = (FP16.name, BF16.name)
"""The 16-bit formats."""
WIDE = (FP32.name, TF32.name, FP64.name)
"""Formats of products outside mixed precision."""
FITTING = 0.9
"""Share of modules whose gradients fit at the loss scale that is chosen for modules on their own: an outlier then still overflows."""
