"""Record where the values of a step lie, and what each format and loss scale would lose of them."""
