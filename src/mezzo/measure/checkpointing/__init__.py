"""Activation checkpointing: what each module keeps and costs, and the plan that is best within a budget."""
