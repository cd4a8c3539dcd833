"""What ran: the counted step, compiled graphs, the script's own CUDA graphs, a digest of the weights."""
