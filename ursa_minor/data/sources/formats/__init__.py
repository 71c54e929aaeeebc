"""Read the rows of a file. Each module supports one file format."""
