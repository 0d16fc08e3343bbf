"""The protocol as a model, which the C++ cores are compared with."""
