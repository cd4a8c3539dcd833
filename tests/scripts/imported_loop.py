"""The loop lives in a module beside the script; the configuration is a file that is executed."""

import os

from loop import train

steps = 3
with open(os.path.join(os.path.dirname(__file__), "configurator.txt")) as file:
    exec(file.read())
train(steps)
