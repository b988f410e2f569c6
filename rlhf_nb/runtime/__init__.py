"""What ties the notebooks' modules to files and libraries: plain modules, written by hand."""
