"""Formats of tables, a file each: how its names end, and how its rows are read."""
