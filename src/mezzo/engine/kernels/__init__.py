"""Kernels of the optimizers' update: one read and one write of everything it touches.

The phases of an update are `reduce` (``sum_of_squares``: finite check and norm in one read of the gradients),
`decide` (one factor for scale, averaging and clipping, one flag whether to skip: numbers on the device) and `apply`
(``adamw``, ``sgd``). ``reference`` defines the results in plain PyTorch; the others compute them fast. ``choose``
picks one for a device, with its reason.
"""
