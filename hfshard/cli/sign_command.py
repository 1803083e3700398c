"""The command that signs a checkpoint."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from dataclasses import asdict
from typing import Any, Final

from hfshard._util.text import format_size
from hfshard.cli.output import count_of, print_json, print_text, printable
from hfshard.errors import InvalidArgumentError
from hfshard.signing.sign import sign_checkpoint

PASSWORD_VARIABLE: Final = "HFSHARD_KEY_PASSWORD"
"""Where the password of a private key is taken from: every user of a machine can read its command lines."""

_ENCRYPTED: Final = b"ENCRYPTED"
"""What the PEM of a key says that has a password."""


def sign(arguments: argparse.Namespace) -> int:
    """Sign a checkpoint, and say what was read for it."""
    result = sign_checkpoint(
        arguments.directory,
        private_key=arguments.private_key,
        password=_password(arguments.private_key),
        signing_certificate=arguments.signing_certificate,
        certificate_chain=arguments.certificate_chain,
        sigstore=_sigstore(arguments),
        verify=arguments.verify,
        progress=arguments.progress,
    )
    if arguments.format == "json":
        print_json(asdict(result))
        return 0
    recorded = f", {format_size(result.recorded_bytes)} by the sha256 of the save" if result.recorded_bytes else ""
    files = count_of(len(result.files), "file")
    print_text(printable(f"{result.signature}: {files} signed; {format_size(result.read_bytes)} read{recorded}"))
    return 0


def _sigstore(arguments: argparse.Namespace) -> dict[str, Any] | None:
    given = {
        "use_ambient_credentials": arguments.use_ambient_credentials,
        "use_staging": arguments.use_staging,
        "trust_config": arguments.trust_config,
    }
    if not arguments.sigstore:
        for name, value in given.items():
            if value:
                raise InvalidArgumentError(f"--{name.replace('_', '-')} is for --sigstore.")
        return None
    return given


def _password(private_key: str | None) -> str | None:
    """The password of a key that has one: from the environment, or asked for on a terminal."""
    if private_key is None or not os.path.isfile(private_key):
        return None
    with open(private_key, "rb") as file:
        if _ENCRYPTED not in file.read():
            return None
    password = os.environ.get(PASSWORD_VARIABLE)
    if password is None and sys.stdin.isatty():
        password = getpass.getpass(f"Password of {printable(private_key)}: ")
    if password is None:
        raise InvalidArgumentError(
            f"'{private_key}' has a password: put it into the environment variable {PASSWORD_VARIABLE}, or run this "
            "on a terminal.",
            path=private_key,
        )
    return password
