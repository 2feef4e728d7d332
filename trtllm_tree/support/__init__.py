"""May this combination run as a tree? Data and rules only; nothing here imports torch."""
