"""The trainings behind the rows of public tables, as models."""
