"""The package's runtimes, one file each, listed in `model.runtimes`. Their modules import no library."""
