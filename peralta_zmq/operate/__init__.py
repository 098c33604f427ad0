"""Running on the machines of a home: local workers now."""
