"""Virtual machines with emulated CXL memory: a CXL device each, all on one file."""
