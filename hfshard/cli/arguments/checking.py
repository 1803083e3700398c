"""Arguments of the commands that say whether a checkpoint is whole and whose it is."""

from __future__ import annotations

from hfshard.cli.arguments.groups import CommandGroup
from hfshard.cli.arguments.shared import add_checkpoint, add_directory, add_format, add_no_progress, add_variant


def add_verify(commands: CommandGroup) -> None:
    """Add `verify`."""
    verify = commands.add_parser(
        "verify",
        help="every file of a checkpoint or of a training run",
        description="Check every file of a checkpoint: of a training checkpoint also the optimizer's and all others; "
        "of a run all its checkpoints. Exit 0: it is whole, 1: it is damaged, 2: bad usage.",
    )
    add_checkpoint(verify)
    add_variant(verify)
    add_format(verify)
    verify.add_argument(
        "--level",
        choices=("full", "structure"),
        default="full",
        help="full: every byte against its checksum (default); structure: what can be checked without reading tensors",
    )
    signed = verify.add_argument_group(
        "signature", "Who must have signed every file (model.sig, see `hfshard sign`): one of these."
    )
    signed.add_argument("--public-key", metavar="FILE", help="the holder of this key: elliptic curve, PEM")
    signed.add_argument(
        "--certificate-chain",
        metavar="FILE",
        action="append",
        default=[],
        help="who has a certificate of this root, PEM; may be repeated",
    )
    signed.add_argument("--identity", help="this Sigstore identity; with --oidc-issuer")
    signed.add_argument("--oidc-issuer", metavar="URL", help="who vouches for the identity")
    signed.add_argument("--use-staging", action="store_true", help="of Sigstore's staging instance")
    signed.add_argument("--trust-config", metavar="FILE", help="of another Sigstore: its keys, JSON")
    add_no_progress(verify)


def add_sign(commands: CommandGroup) -> None:
    """Add `sign`."""
    sign = commands.add_parser(
        "sign",
        help="every file of a checkpoint, as OpenSSF Model Signing does",
        description="Sign every file of a directory: writes model.sig beside them, which `hfshard verify` and "
        "`model_signing verify` check. Shards that hfshard saved are not read again. The password of a key is taken "
        "from HFSHARD_KEY_PASSWORD, or asked for.",
    )
    add_directory(sign, "the checkpoint's directory", takes_address=False)
    who = sign.add_mutually_exclusive_group(required=True)
    who.add_argument("--private-key", metavar="FILE", help="an elliptic curve key (P-256, P-384, P-521), PEM")
    who.add_argument("--sigstore", action="store_true", help="with a Sigstore identity; asks in the browser")
    sign.add_argument("--signing-certificate", metavar="FILE", help="the certificate of the key, PEM")
    sign.add_argument(
        "--certificate-chain",
        metavar="FILE",
        action="append",
        default=[],
        help="a certificate between that one and the root, PEM; may be repeated",
    )
    sign.add_argument(
        "--use-ambient-credentials", action="store_true", help="Sigstore: the identity of this workflow, as in CI"
    )
    sign.add_argument("--use-staging", action="store_true", help="Sigstore: its staging instance")
    sign.add_argument("--trust-config", metavar="FILE", help="another Sigstore: its keys, JSON")
    sign.add_argument(
        "--verify",
        choices=("structure", "full"),
        default="structure",
        help="full: read the shards too, and compare every byte before it is signed (default: %(default)s)",
    )
    add_format(sign)
    add_no_progress(sign)
