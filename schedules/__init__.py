"""TIR kernels, their schedules and search spaces."""
