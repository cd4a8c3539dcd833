"""Several processes that train one model: what they exchange, and where they must agree."""
