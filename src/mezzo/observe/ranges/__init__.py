"""Record the magnitudes of a step's values, and what each format and loss scale would lose of them."""
