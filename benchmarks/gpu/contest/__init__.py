"""Is Mezzo faster than a hand-written torch.amp loop, Accelerate and Lightning Fabric on one GPU?

``python -m benchmarks contest --minutes 8`` from the root of the repository; needs torch, and uses timm, transformers,
accelerate and lightning if they are installed. Every model is built from a configuration: nothing is downloaded.

A *way* is a library, a policy and how steps run. All ways have the same initial weights, batches (created on the device, four of them used
cyclically), AdamW settings, clipping to a norm of 1, channels_last and cudnn.benchmark for convolutional models, torch's own TF32 setting
except under the policies ``fp32`` and ``tf32``, and no dropout, so that losses can be compared. A way's block of steps is timed by CUDA
events; the ways of a case take turns, and ratios are computed within a round. Loading data is not part of a step.
"""
