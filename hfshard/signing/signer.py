"""The required signer of a checkpoint: the holder of a key or a certificate, or a Sigstore identity."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hfshard._util.arguments import absolute_path
from hfshard.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedBy:
    """The required signer: pass a public key, or certificates, or an identity with its issuer.

    Raises:
        InvalidArgumentError: None of them is given, or two; or a file is missing.

    Example:
        by = hfshard.signing.SignedBy(certificate_chain=["root.pem"])
        report = hfshard.verify_checkpoint("out", public_key=by)
    """

    public_key: str | os.PathLike[str] | None = None
    """File of an elliptic curve key, PEM."""
    certificate_chain: Sequence[str | os.PathLike[str]] = ()
    """Files of the trusted certificates, PEM: the root, and intermediate ones that the signature does not include."""
    identity: str | None = None
    """Sigstore identity, such as an e-mail address, or the address of a workflow."""
    oidc_issuer: str | None = None
    """Issuer that vouches for the identity, such as "https://accounts.google.com"."""
    use_staging: bool = False
    """Use Sigstore's staging instance, for tests."""
    trust_config: str | os.PathLike[str] | None = None
    """File of another Sigstore's keys, JSON."""

    def __post_init__(self) -> None:
        """Check the arguments, and make paths absolute."""
        kinds = [self.public_key is not None, bool(self.certificate_chain), self.identity is not None]
        if sum(kinds) != 1 or (self.identity is None) != (self.oidc_issuer is None):
            raise InvalidArgumentError(
                "Name the required signer in exactly one way: by a public key, by certificates, or by an identity and "
                "its OIDC issuer."
            )
        if isinstance(self.certificate_chain, str | os.PathLike):
            object.__setattr__(self, "certificate_chain", [self.certificate_chain])
        if self.public_key is not None:
            object.__setattr__(self, "public_key", existing_file(self.public_key, "public_key"))
        chain = tuple(existing_file(path, "certificate_chain") for path in self.certificate_chain)
        object.__setattr__(self, "certificate_chain", chain)
        if self.trust_config is not None:
            object.__setattr__(self, "trust_config", existing_file(self.trust_config, "trust_config"))

    @classmethod
    def of(cls, value: str | os.PathLike[str] | SignedBy) -> SignedBy:
        """Convert a `public_key` argument: the file of a key, or a required signer."""
        if isinstance(value, SignedBy):
            return value
        if not isinstance(value, str | os.PathLike):
            raise InvalidArgumentError(
                f"public_key must be a public key file or a hfshard.signing.SignedBy, got {value!r:.200}."
            )
        return cls(public_key=value)

    def __str__(self) -> str:
        if self.public_key is not None:
            return f"the key of '{self.public_key}'"
        if self.certificate_chain:
            return f"a certificate of {', '.join(repr(os.fspath(path)) for path in self.certificate_chain)}"
        return f"'{self.identity}' of '{self.oidc_issuer}'"

    def choose(self, config: Any) -> Any:
        """Set the verifier of the library's `verifying.Config`."""
        if self.public_key is not None:
            return config.use_elliptic_key_verifier(public_key=self.public_key)
        if self.certificate_chain:
            return config.use_certificate_verifier(certificate_chain=self.certificate_chain)
        return config.use_sigstore_verifier(
            identity=self.identity,
            oidc_issuer=self.oidc_issuer,
            use_staging=self.use_staging,
            trust_config=self.trust_config,
        )


def existing_file(path: str | os.PathLike[str], name: str) -> str:
    """Return the absolute path of a file that was given as an argument.

    Raises:
        InvalidArgumentError: It is not a file.
    """
    found = absolute_path(path, name)
    what = name.replace("_", " ")  # the words of the option, too
    if os.path.isdir(found):
        raise InvalidArgumentError(f"The {what} '{found}' is a directory, not a file.", path=found)
    if not os.path.isfile(found):
        raise InvalidArgumentError(f"The {what} '{found}' does not exist.", path=found)
    return found
