"""Code generators: partition -> emit -> build -> run for each accelerator, one folder a backend."""
