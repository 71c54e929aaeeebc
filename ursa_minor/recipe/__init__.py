"""The recipe: every number that changes the result, from a YAML file and flags."""
