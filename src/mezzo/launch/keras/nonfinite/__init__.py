"""``mezzo diagnose`` for a Keras script on TensorFlow: what one run records."""
