"""A file for each kind of case."""
