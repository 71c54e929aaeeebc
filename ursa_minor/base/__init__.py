"""Used by all rooms: bad input that ends with exit 2, atomic files, requests to stop, URLs without secrets."""
