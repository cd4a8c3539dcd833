"""What is changed in a script's models from outside: checkpointing, layout, communication."""
