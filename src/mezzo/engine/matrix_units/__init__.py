"""Matrix units: 16-bit and FP8 arithmetic, emulated or the device's own, and the switches of FP32 products."""
