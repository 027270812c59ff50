"""`python -m jaxcache.kernels.check`: are the kernels right on this machine, how fast are they, how are they best
cut? Without an accelerator: as much of that as a CPU can tell, and what it cannot."""
