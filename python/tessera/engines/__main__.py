"""The command `tessera-engines`: `python -m tessera.engines map MODEL --tp 8`."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .._errors import Error, InvalidArgumentError
from ._checkpoints import described
from ._learn import learn_map
from ._report import Report

_OK, _BAD_INPUT = 0, 2  # as of the command tessera
_MOST = 1 << 12

_EXAMPLES = """\
Examples:
  tessera-engines map /models/Llama-3.1-8B --tp 8
  tessera-engines map config.json --tp 2 --every-layer
  tessera-engines map /models/Qwen3-30B-A3B --tp 4 --expert-parallel --json

Exit status: 0 success, 2 arguments or input.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        _map(options)
    except Error as error:
        print(f"tessera-engines: {' '.join(str(error).split())}", file=sys.stderr)
        return _BAD_INPUT
    return _OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tessera-engines",
        description="Asks an engine's own loader where a checkpoint's tensors go.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="SUBCOMMAND", required=True)
    told = "Print what each rank holds of each tensor, and what the loader computes"
    one = commands.add_parser(
        "map", help=told, description=told, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    one.add_argument("model", metavar="MODEL", help="Folder of a Hugging Face model, or its config.json; no weights")
    one.add_argument("--tp", type=int, default=1, metavar="N", help="Ranks of tensor parallelism (default: 1)")
    one.add_argument("--expert-parallel", action="store_true", help="Share out whole experts")
    one.add_argument("--engine", choices=["vllm"], default="vllm", help="Whose loader is asked (default: vllm)")
    one.add_argument("--every-layer", action="store_true", help="Do not join layers that are held in the same way")
    one.add_argument("--trust-remote-code", action="store_true", help="Run code that comes with the model")
    one.add_argument("--json", action="store_true", help="Print JSON")
    return parser


def _map(options: argparse.Namespace) -> None:
    if not 1 <= options.tp <= _MOST:
        raise InvalidArgumentError(f"--tp {options.tp}: give 1 to {_MOST}")
    with _folder_of(Path(options.model)) as folder:
        report, heading = _of_vllm(folder, options)
    if options.json:
        print(json.dumps({**heading, **report.json()}, indent=1))
        return
    how = ", experts whole" if options.expert_parallel else ""
    print(f"vLLM {heading['version']}, {heading['model']}, tensor parallel {options.tp}{how}")
    print(f"{len(report.holdings)} tensors, {heading['checkpoint']}")
    print()
    for line in report.text(options.every_layer):
        print(line)


@contextlib.contextmanager
def _folder_of(model: Path) -> Iterator[Path]:
    """Of a model; one with no more than the config if that is what is given."""
    if (model / "config.json").is_file():
        yield model
    elif model.is_file() and model.name == "config.json":
        yield model.parent
    elif model.is_file() and model.suffix == ".json":
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(model, Path(folder) / "config.json")
            yield Path(folder)
    else:
        raise InvalidArgumentError(f"{model}: give the folder of a model, with its config.json, or that file")


def _of_vllm(folder: Path, options: argparse.Namespace) -> tuple[Report, dict[str, str]]:
    from .vllm import _shadow

    _shadow.quiet()
    try:
        import vllm
    except ImportError as error:
        raise InvalidArgumentError(
            f"vLLM's own loader is asked, and vLLM is not installed here ({error}): pip install tessera-tensors[vllm]"
        ) from error
    checkpoint, source = described(folder, trust_remote_code=options.trust_remote_code)
    config = _shadow.config_of(
        folder,
        options.tp,
        expert_parallel=options.expert_parallel,
        trust_remote_code=options.trust_remote_code,
    )
    with _shadow.group(config):
        maps = [
            learn_map(_shadow.as_rank(config, rank), checkpoint, meta=lambda model: contextlib.nullcontext())
            for rank in range(options.tp)
        ]
    heading = {
        "engine": "vllm",
        "version": str(getattr(vllm, "__version__", "?")),
        "model": ", ".join(config.model_config.architectures),
        "checkpoint": source,
    }
    return Report(checkpoint, maps), heading


if __name__ == "__main__":
    sys.exit(main())
