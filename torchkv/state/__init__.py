"""The content of a store, and the forms in which it is saved and loaded."""
