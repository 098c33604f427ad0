"""What people see of a run: its files, its table, its report."""
