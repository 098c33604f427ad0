"""Operation of a run: bin/lan controls its workers, bin/doctor checks machines."""
