"""Define one task per module.

A definition names the data set, converts its rows into questions and lists published scores.
"""
