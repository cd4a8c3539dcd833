"""``mezzo predict``: time, memory and the largest batch of a training on GPUs that this machine does not have.

``traced``      a model by name, or a script, traced, and what the prediction assumes
``real_gpus``   predictions beside measurements of other commands; ``fitting``: what would fit after a script ran out of memory
"""
