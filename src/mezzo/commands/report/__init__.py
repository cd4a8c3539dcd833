"""``mezzo report``: existing records, as text and as pages."""
