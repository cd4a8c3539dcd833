"""Mixed-precision training that people can turn on, trust and prove."""
