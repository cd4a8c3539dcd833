"""``mezzo predict``: time, memory and the largest batch of a training on GPUs that this machine does not have.

``traced``      a model by name, or a script, traced; ``assumed``: what the prediction assumes; ``renting``: what a GPU costs
``real_gpus``   predictions beside measurements of other commands; ``fitting``: what would fit after a script ran out of memory
"""
