"""End a program with the command that installs what it needs, where its imports would end it with a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

# The extras of pyproject.toml, and the packages of each that examples import.
EXAMPLES = "pip install -e '.[examples]'"
MODELS = "pip install -e '.[models,examples]'"
RAY = "pip install 'ray[train]'"
PACKAGES = {"matplotlib", "sklearn", "transformers", "diffusers", "peft", "ray"}


@contextmanager
def installed_by(command: str) -> Iterator[None]:
    """Print a command and exit with status 1 if a package of `PACKAGES` that is imported inside is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        # Any other module that is missing is a mistake, which this command would not mend.
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES:
            raise
        raise SystemExit(command) from None
