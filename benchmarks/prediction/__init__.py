"""How far can predictions of time and memory be trusted."""
