"""Record every operation of chosen steps: its formats, module, phase, FLOPs and bytes, and what is worth changing."""
