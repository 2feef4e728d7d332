"""The runtimes under the core. Each host fills the ports in files of the same names."""
