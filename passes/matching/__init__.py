"""Reading a graph by meaning: what CanonicalizeTransformer's recognisers stand on, one idea a file."""
