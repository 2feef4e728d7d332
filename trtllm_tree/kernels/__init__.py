"""The ops. Each folder holds one: its contract, a torch reference written from the maths, a Triton kernel."""
