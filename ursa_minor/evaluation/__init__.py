"""How good the model is: validation loss, tasks, samples."""
