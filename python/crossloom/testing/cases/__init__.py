"""The strategies by what they draw; :mod:`crossloom.testing.strategies` is their public face."""
