"""Mezzo beside a hand-written torch.amp loop, Accelerate and Lightning Fabric on one GPU, in a fixed number of minutes.

``python benchmarks/gpu.py --minutes 8`` from the root of the repository; needs torch, and uses timm, transformers,
accelerate and lightning if they are installed. Every model is built from a configuration: nothing is downloaded.

Equal for all ways: the model's first weights, the batches (made on the device, four in turn), AdamW with the same settings,
clipping to a norm of 1, channels_last and cudnn.benchmark for convolutional models, torch's own TF32 setting except under the policies
``fp32`` and ``tf32``, dropout off so that losses can be compared. A way's block of steps is timed by CUDA events; the ways of a case
take turns, and ratios are taken within a round. Loading data is not part of a step.
"""
