"""The `semidice` command: starts the command line, or says in one line which extra it needs."""

import sys

NEEDED_BY_THE_COMMAND_LINE = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command line; exit with one line if the extra `train` is not installed."""
    try:
        from .cli import app
    except KeyboardInterrupt:
        # as `cli` does for an interrupt of a command
        sys.stderr.write("semidice: interrupted\n")
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in NEEDED_BY_THE_COMMAND_LINE:
            raise
        sys.exit(f"semidice: the command line needs {error.name}; run: pip install 'semidice[train]'")
    app()


if __name__ == "__main__":
    main()
