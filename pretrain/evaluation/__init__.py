"""How good the model is: validation loss, HellaSwag, samples."""
