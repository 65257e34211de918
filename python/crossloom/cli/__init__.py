"""The ``tvmc`` command: one module a subcommand, none of which imports TVM before it runs."""
