"""Judge what a check found, by pure functions of records and facts. Runs no script and imports no torch.

``offers``       the policies worth trying on a device, and why; one is the script's own mixed precision
``gains``        a policy's gains: measured, predicted, or bounded
``worth``        whether these gains are worth a switch
``preference``   the choice among policies that train alike
``answer``       the answer, from all of these
"""
