"""Tasks, a file each: which data set, how a row becomes a question, what others scored."""
