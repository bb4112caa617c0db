"""Every registered method through one suite."""
