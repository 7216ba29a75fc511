//! The job secret: what a process must know to be let into a job.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Bytes of a proof (HMAC-SHA-256).
pub(crate) const PROOF_BYTES: usize = 32;
/// Bytes of a nonce.
pub(crate) const NONCE_BYTES: usize = 32;

/// A proof of knowing the secret.
pub(crate) type Proof = [u8; PROOF_BYTES];
/// A number that is used once.
pub(crate) type Nonce = [u8; NONCE_BYTES];

/// A secret could not be made.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// It had no characters.
    #[error("the job secret is empty; use a random string, the same on every rank")]
    Empty,
    /// The system gave no random bytes.
    #[error("cannot read random bytes from the system: {source}")]
    Random {
        /// The system's reason.
        source: getrandom::Error,
    },
}

/// A string that every rank of a job knows and nobody else. It never crosses the wire, and is never printed.
#[derive(Clone)]
pub struct Secret(Arc<str>);

impl Secret {
    /// Takes a secret that was agreed elsewhere.
    ///
    /// # Errors
    /// [`SecretError::Empty`].
    pub fn new(text: &str) -> Result<Self, SecretError> {
        if text.is_empty() { Err(SecretError::Empty) } else { Ok(Self(text.into())) }
    }

    /// A fresh secret of 256 random bits, as 64 hexadecimal digits, for a launcher to hand to its ranks.
    ///
    /// # Errors
    /// [`SecretError::Random`].
    pub fn generate() -> Result<Self, SecretError> {
        Ok(Self(hex(&nonce()?).into()))
    }

    /// The text, for handing it to a child process. Do not print it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The proof for `parts` in the role `label`. Parts are kept apart by their lengths.
    pub(crate) fn prove(&self, label: &str, parts: &[&[u8]]) -> Proof {
        self.mac(label, parts).finalize().into_bytes().into()
    }

    /// Whether `proof` is [`Secret::prove`] of the same arguments. Takes the same time for every wrong proof.
    pub(crate) fn check(&self, label: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(label, parts).verify_slice(proof).is_ok()
    }

    fn mac(&self, label: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(self.0.as_bytes()).expect("HMAC takes keys of any length");
        for part in std::iter::once(label.as_bytes()).chain(parts.iter().copied()) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// Fresh random bytes.
pub(crate) fn nonce() -> Result<Nonce, SecretError> {
    let mut bytes = [0; NONCE_BYTES];
    getrandom::fill(&mut bytes).map_err(|source| SecretError::Random { source })?;
    Ok(bytes)
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_never_printed() {
        let secret = Secret::new("hunter2").unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(hidden)");
    }

    #[test]
    fn a_proof_holds_for_its_secret_role_and_parts_only() {
        let (a, b) = (Secret::new("a").unwrap(), Secret::new("b").unwrap());
        let proof = a.prove("root", &[b"xy", b"z"]);
        assert!(a.check("root", &[b"xy", b"z"], &proof));
        assert!(!b.check("root", &[b"xy", b"z"], &proof));
        assert!(!a.check("peer", &[b"xy", b"z"], &proof));
        assert!(!a.check("root", &[b"x", b"yz"], &proof), "the border between parts counts");
        assert!(!a.check("root", &[b"xy", b"z"], &proof[..31]));
    }

    #[test]
    fn generated_secrets_differ() {
        let (a, b) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        assert_eq!(a.expose().len(), 64);
        assert_ne!(a.expose(), b.expose());
        assert!(Secret::new("").is_err());
    }
}
