"""File formats, one module each: the suffixes of a format and how its rows are read."""
