"""``mezzo predict``: time, memory and the largest batch of a training on GPUs that this machine does not have.

``traced``      a model by name, or a script, traced, and what the prediction assumes, also for the commands that predict what they measure
"""
