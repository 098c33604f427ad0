"""Which problem comes next."""
