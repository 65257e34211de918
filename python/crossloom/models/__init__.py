"""Reference models the library is measured on."""
