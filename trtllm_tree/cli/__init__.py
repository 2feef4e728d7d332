"""The command `trtllm-tree`: a file per subcommand, with `add_parser(subparsers)` and `run(args) -> int`."""
