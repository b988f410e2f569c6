"""The apparatus: what ties the notebooks' modules to files and libraries. Written by hand, not exported."""
