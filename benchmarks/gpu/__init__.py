"""What only a GPU, or a compiler for one, can say."""
