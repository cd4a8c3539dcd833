"""Judge what a check has found. Pure functions of records and facts; nothing here runs a script or imports torch.

``offers``       the policies worth trying on a device, and why
``own_amp``      whether a script switches mixed precision on by itself
``preference``   which of several policies that train alike an expert would choose
``gains``        what a policy gains: as measured, or at most
``answer``       the answer, from all of these
"""
