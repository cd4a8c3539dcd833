"""Memory of a tape on a GPU: tensors, allocator, cuDNN's workspaces."""
